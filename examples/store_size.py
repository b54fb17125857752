#!/usr/bin/env python3
"""Compares the size of a store in three ways: content stored once, -o dedup=off, and shadow-git.

    python3 examples/store_size.py [--jailfs PATH] [--only NAME]... [--small] [--without-git]
                                   [--dir DIR]

Each scenario is a list of steps. Each step runs in all three ways in turn, so that other work on
the machine affects all of them alike. After each step the mounts take a checkpoint; for shadow-git,
`git add -A` of the work tree into a bare repository, and a commit. The time of a step includes its
checkpoint. A store is measured in blocks on disk (du), after all layers were searched.

    differs   the blocks of 4 KiB of each step that contain a new byte, with its edit known
    pools     the content in a store with content stored once
    once      that whole store, with its records
    times     `once` divided by `differs`

`--small` divides the sizes by 16 and the steps by 4. `--without-git` leaves out shadow-git, which
takes most of the time. Needs git, and npm for the scenario `npm`.
"""

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

BLOCK = 4096


def blocks(size):
    return (size + BLOCK - 1) // BLOCK * BLOCK


def touched(start, end):
    """Bytes of the blocks that a range of a file touches."""
    return blocks(end) - start // BLOCK * BLOCK


class Scenario:
    """Steps over a tree. `step(root, n)` runs step n and returns its new bytes, for any root."""

    def __init__(self, small):
        self.small = small
        self.random = random.Random(1)

    def base(self, root):
        pass


class Edits(Scenario):
    """A repository of 400 files; each step saves 20 with a small change, as an editor does."""

    name = "edits"

    def __init__(self, small):
        super().__init__(small)
        self.steps = 25 if small else 100
        self.files = {}
        for n in range(400):
            size = int(self.random.lognormvariate(8.5, 1.1)) + 50
            lines = []
            while sum(map(len, lines)) < size:
                words = (self.random.choice(WORDS) for _ in range(self.random.randrange(1, 12)))
                lines.append((" ".join(words) + "\n").encode())
            self.files[f"src/d{n % 20}/f{n}.py"] = b"".join(lines)
        self.first = True

    def base(self, root):
        for path, content in self.files.items():
            os.makedirs(os.path.join(root, os.path.dirname(path)), exist_ok=True)
            write(os.path.join(root, path), content)

    def plan(self, n):
        edits, differs = {}, 0
        for path in self.random.sample(sorted(self.files), 20):
            content = self.files[path]
            at = content.find(b"\n", self.random.randrange(len(content))) + 1
            line = (" ".join(self.random.choices(WORDS, k=6)) + f" {n}\n").encode()
            cut = content.find(b"\n", at) + 1 if self.random.random() < 0.5 else at
            content = content[:at] + line + content[cut:]
            differs += touched(at, at + len(line))
            edits[path] = self.files[path] = content
        return edits, differs

    def step(self, root, plan):
        for path, content in plan.items():
            path = os.path.join(root, path)
            write(path + "~", content)
            os.rename(path + "~", path)


class Prepend(Scenario):
    """A file of 32 MiB; each of 16 steps puts 10 bytes before it."""

    name = "prepend"

    def __init__(self, small):
        super().__init__(small)
        self.steps = 16
        self.content = self.random.randbytes((2 if small else 32) << 20)

    def plan(self, n):
        if n == 0:
            return self.content, blocks(len(self.content))
        self.content = self.random.randbytes(10) + self.content
        return self.content, BLOCK

    def step(self, root, content):
        write(os.path.join(root, "file"), content)


class Rewrites(Scenario):
    """A file that grows to 4.1 MB: each of 873 rewrites appends bytes and changes one place."""

    name = "rewrites"

    def __init__(self, small):
        super().__init__(small)
        self.steps = 218 if small else 873
        self.content = b""

    def plan(self, n):
        size = len(self.content)
        content = self.content + self.random.randbytes(4_100_000 // 873)
        at = self.random.randrange(len(content))
        self.content = content[:at] + self.random.randbytes(8) + content[at + 8 :]
        return self.content, touched(size, len(content)) + (
            touched(at, at + 8) if at + 8 < size else 0
        )

    def step(self, root, content):
        write(os.path.join(root, "file"), content)


class Database(Scenario):
    """A file of 1 GiB; each of 20 steps writes 256 blocks of 4 KiB at random places in it."""

    name = "database"

    def __init__(self, small):
        super().__init__(small)
        self.steps = 21
        self.size = (64 if small else 1024) << 20

    def plan(self, n):
        if n == 0:
            return None, self.size
        places = self.random.sample(range(self.size // BLOCK), 256)
        return [(at * BLOCK, self.random.randbytes(BLOCK)) for at in places], 256 * BLOCK

    def step(self, root, plan):
        path = os.path.join(root, "db")
        if plan is None:
            source = random.Random(2)
            with open(path, "wb") as file:
                for _ in range(self.size >> 20):
                    file.write(source.randbytes(1 << 20))
            return
        with open(path, "r+b") as file:
            for at, content in plan:
                file.seek(at)
                file.write(content)


class Npm(Scenario):
    """`npm install` of a small application, deleted and repeated three times."""

    name = "npm"
    steps = 4

    def base(self, root):
        wanted = {
            "express": "4.19.2",
            "lodash": "4.17.21",
            "typescript": "5.4.5",
            "eslint": "8.57.0",
        }
        text = json.dumps(
            {"name": "app", "version": "1.0.0", "private": True, "dependencies": wanted}
        )
        write(os.path.join(root, "package.json"), text.encode())

    def plan(self, n):
        return n, None

    def step(self, root, n):
        shutil.rmtree(os.path.join(root, "node_modules"), ignore_errors=True)
        command = ["npm", "install", "--no-audit", "--no-fund", "--prefer-offline", "--silent"]
        subprocess.run(command, cwd=root, check=True, stdout=subprocess.DEVNULL)


WORDS = (
    "def class return self if else for in import from "
    "name value path node tree list map key item text not None"
).split()
SCENARIOS = [Edits, Prepend, Npm, Rewrites, Database]


def write(path, content):
    with open(path, "wb") as file:
        file.write(content)


def on_disk(path, only=None):
    """Bytes of all blocks, or of files of one name. The reserve of the store does not count."""
    total = 0
    for directory, _, files in os.walk(path):
        total += 0 if only else os.lstat(directory).st_blocks * 512
        for name in files:
            if name == only or not only and name not in ("reserve", "daemon.log"):
                total += os.lstat(os.path.join(directory, name)).st_blocks * 512
    return total


class Jailfs:
    def __init__(self, program, place, label, options):
        self.program = program
        self.base, self.root = os.path.join(place, label, "base"), os.path.join(place, label, "mnt")
        self.store = os.path.join(place, label, "store")
        os.makedirs(self.base)
        os.makedirs(self.root)
        self.options = options

    def begin(self, scenario):
        scenario.base(self.base)
        subprocess.run(
            [self.program, "mount", self.base, self.root, "--store", self.store, *self.options],
            check=True,
        )

    def keep(self, n):
        subprocess.run(
            [self.program, "--store", self.store, "checkpoint"],
            check=True,
            stdout=subprocess.DEVNULL,
        )

    def settle(self):
        """Waits until all layers are searched. Returns seconds."""
        start = time.monotonic()
        while self.info()["to_do"] > 0 and "dedup=off" not in self.options:
            time.sleep(0.2)
        return time.monotonic() - start

    def info(self):
        command = [self.program, "--store", self.store, "info", "--json"]
        return json.loads(
            subprocess.run(command, check=True, capture_output=True).stdout.splitlines()[-1]
        )

    def size(self):
        return on_disk(self.store)

    def end(self):
        command = [self.program, "--store", self.store, "check", "--read-data"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        subprocess.run([self.program, "umount", self.root], check=True)


class ShadowGit:
    def __init__(self, place):
        self.root, self.bare = os.path.join(place, "git", "work"), os.path.join(
            place, "git", "bare"
        )
        os.makedirs(self.root)
        subprocess.run(["git", "init", "-q", "--bare", self.bare], check=True)
        self.git("config", "gc.auto", "0")

    def git(self, *words):
        environment = dict(os.environ, GIT_DIR=self.bare, GIT_WORK_TREE=self.root)
        for who in ("AUTHOR", "COMMITTER"):
            environment.update({f"GIT_{who}_NAME": "x", f"GIT_{who}_EMAIL": "x"})
        subprocess.run(
            ["git", *words], check=True, cwd=self.root, env=environment, stdout=subprocess.DEVNULL
        )

    def begin(self, scenario):
        scenario.base(self.root)
        self.git("add", "-A")
        self.git("commit", "-q", "--allow-empty", "-m", "base")
        self.before = on_disk(self.bare)

    def keep(self, n):
        self.git("add", "-A")
        self.git("commit", "-q", "--allow-empty", "-m", str(n))

    def settle(self):
        return 0

    def size(self):
        return on_disk(self.bare) - self.before

    def end(self):
        pass


def measure(kind, program, place, small, with_git):
    scenario = kind(small)
    ways = {
        "once": Jailfs(program, place, "once", []),
        "twice": Jailfs(program, place, "twice", ["-o", "dedup=off"]),
    }
    if with_git:
        ways["git"] = ShadowGit(place)
    times = {label: [] for label in ways}
    differs, first = 0, []
    for way in ways.values():
        way.begin(scenario)
    for n in range(scenario.steps):
        plan, new = scenario.plan(n)
        order = list(ways)
        order = order[n % len(order) :] + order[: n % len(order)]
        for label in order:
            way = ways[label]
            start = time.monotonic()
            scenario.step(way.root, plan)
            way.keep(n)
            times[label].append(time.monotonic() - start)
        if new is None:
            # Only the host knows the new bytes: the first install is everything to store.
            new = sum(tree(ways["once"].root)) if n == 0 else 0
        differs += new
    late = ways["once"].settle()
    sizes = {label: way.size() for label, way in ways.items()}
    pools = on_disk(ways["once"].store, "pool")
    try:
        for way in ways.values():
            way.end()
    except subprocess.CalledProcessError as error:
        # Another mount namespace may hold a copy of the mount.
        print(f"{kind.name}: {error}", file=sys.stderr)
    return {
        "steps": scenario.steps,
        "differs": differs,
        "sizes": sizes,
        "times": times,
        "late": late,
        "pools": pools,
    }


def tree(root):
    for directory, _, files in os.walk(os.path.join(root, "node_modules")):
        for name in files:
            yield blocks(os.lstat(os.path.join(directory, name)).st_size)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jailfs", default="jailfs")
    parser.add_argument("--only", action="append", choices=[kind.name for kind in SCENARIOS])
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--without-git", action="store_true")
    parser.add_argument("--dir", help="where the stores are made")
    options = parser.parse_args()
    row = "{:<9} {:>5} {:>9} {:>9} {:>9} {:>6} {:>9} {:>9} | {:>17} {:>17} {:>17} {:>6}"
    print(
        "sizes in MiB; times of a step in ms: median, mean; "
        "late: seconds until all layers were searched"
    )
    print(f"load at the start: {os.getloadavg()}")
    print(
        row.format(
            "scenario",
            "steps",
            "differs",
            "pools",
            "once",
            "times",
            "twice",
            "git",
            "once",
            "twice",
            "git",
            "late",
        )
    )
    for kind in SCENARIOS:
        if options.only and kind.name not in options.only:
            continue
        with tempfile.TemporaryDirectory(dir=options.dir, ignore_cleanup_errors=True) as place:
            found = measure(kind, options.jailfs, place, options.small, not options.without_git)
        mib = lambda number: f"{number / (1 << 20):.2f}"
        spent = lambda label: (
            "{:.0f}, {:.0f}".format(
                1000 * statistics.median(found["times"][label]),
                1000 * statistics.mean(found["times"][label]),
            )
            if label in found["times"]
            else "-"
        )
        sizes = found["sizes"]
        times = f"{sizes['once'] / found['differs']:.2f}"
        print(
            row.format(
                kind.name,
                found["steps"],
                mib(found["differs"]),
                mib(found["pools"]),
                mib(sizes["once"]),
                times,
                mib(sizes["twice"]),
                mib(sizes["git"]) if "git" in sizes else "-",
                spent("once"),
                spent("twice"),
                spent("git"),
                f"{found['late']:.0f}",
            ),
            flush=True,
        )
    print(f"load at the end: {os.getloadavg()}")


if __name__ == "__main__":
    sys.exit(main())
