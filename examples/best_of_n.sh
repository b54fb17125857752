#!/bin/sh
# Best of N: eight attempts repair a program side by side, and the one that passes most tests wins.
#
#     examples/best_of_n.sh [DIRECTORY]
#
# The "agent" changes one operator of the program at random, again and again, as long as it has
# tries. A real one would be a coding agent; nothing else here would differ. `jailfs` must be in
# PATH, or named by $JAILFS. The directory must be empty; the default is a temporary one.
set -eu

jailfs=${JAILFS:-jailfs}
dir=${1:-$(mktemp -d)}
cd "$dir"
[ -z "$(ls -A)" ] || { echo "best_of_n: '$dir' is not empty" >&2; exit 2; }

# A program with three wrong operators, and its tests.
cat > triangle.py <<'EOF'
def kind(a, b, c):
    if a + b < c or a + c <= b or b + c <= a:
        return "none"
    if a == b or b == c:
        return "equilateral"
    if a == b and b == c or a == c:
        return "isosceles"
    return "scalene"
EOF
cat > tests.py <<'EOF'
import triangle
cases = {(3, 4, 5): "scalene", (2, 2, 2): "equilateral", (2, 2, 3): "isosceles",
         (3, 2, 2): "isosceles", (2, 3, 2): "isosceles", (1, 2, 3): "none", (3, 1, 2): "none",
         (1, 1, 3): "none", (4, 5, 6): "scalene", (5, 5, 9): "isosceles"}
print(sum(triangle.kind(*sides) == kind for sides, kind in cases.items()))
EOF
cat > mutate.py <<'EOF'
import contextlib, io, os, random, re, runpy, sys, types
operators = {"<": ["<=", "<"], "<=": ["<", "<="], "==": ["==", "!="], "or": ["and", "or"],
             "and": ["or", "and"]}
random.seed(int(os.environ["JAILFS_ATTEMPT"]))

def passed(text):
    sys.modules["triangle"] = module = types.ModuleType("triangle")
    exec(text, module.__dict__)
    with contextlib.redirect_stdout(io.StringIO()) as output:
        runpy.run_path("tests.py")
    return int(output.getvalue())

text = open("triangle.py").read()
best = passed(text)
for _ in range(25):
    found = list(re.finditer(r"<=|==|<|\bor\b|\band\b", text))
    chosen = random.sample(found, random.choice([1, 2]))
    tried = text
    for one in sorted(chosen, key=lambda one: -one.start()):
        other = operators[one.group()][0]
        if other == one.group():
            other = operators[one.group()][1]
        tried = tried[:one.start()] + other + tried[one.end():]
    if passed(tried) >= best:
        best, text = passed(tried), tried
open("triangle.py", "w").write(text)
print("passes", best)
EOF
echo "before: $(python3 -B tests.py) of 10 tests pass"

# The race. Each attempt works in a fork of its own; the directory does not change. The losers stay
# as forks, so that they can be compared with the winner.
"$jailfs" run --forks 8 --keep --keep-forks --timeout 5m --pick 'python3 -B tests.py' \
    -- python3 -B mutate.py

echo "the winner against one of the others:"
other=$("$jailfs" forks --json | sed -n 's/.*"name":"\(run-[0-9]*-[0-9]*\)".*/\1/p' | head -n 1)
"$jailfs" diff -p "$other@" @ || true

# Meanwhile the notes were written in another fork. A merge takes them over.
"$jailfs" fork notes
"$jailfs" --head notes run --keep -- sh -c 'echo "Repaired the conditions." > CHANGES'
"$jailfs" --head notes checkpoint -m "notes" > /dev/null
if "$jailfs" merge --help > /dev/null 2>&1; then
    "$jailfs" merge notes
else
    "$jailfs" restore notes@-1 CHANGES
fi

# Now the directory gets the changes, and the forks are dropped.
"$jailfs" apply
"$jailfs" forks --json | sed -n 's/.*"name":"\([^"]*\)".*/\1/p' | grep -v '^main$' |
    while read -r fork; do "$jailfs" fork --drop "$fork"; done
echo "after: $(python3 -B tests.py) of 10 tests pass"
