# git: repositories that were cloned, rebased, packed and collected, and their state afterwards.
export GIT_AUTHOR_NAME=t GIT_AUTHOR_EMAIL=t@example.org
export GIT_COMMITTER_NAME=t GIT_COMMITTER_EMAIL=t@example.org
export GIT_CONFIG_NOSYSTEM=1 GIT_EDITOR=true
# No background job of git may change a tree while it is compared.
export GIT_CONFIG_COUNT=2 GIT_CONFIG_KEY_0=gc.auto GIT_CONFIG_VALUE_0=0
export GIT_CONFIG_KEY_1=maintenance.auto GIT_CONFIG_VALUE_1=false

commit() { # NAME COUNT: that many commits on files of that name
    for n in $(seq "$2"); do
        mkdir -p "d$((n % 5))"
        seq "$n" $((n + 40)) > "d$((n % 5))/$1$n"
        echo "$1 $n" >> "all-$1"
        git add -A
        git commit -qm "$1 $n"
    done
}

heads() {
    for repository in origin.git near far tree; do
        git -C $repository for-each-ref --format='%(refname) %(objectname)'
        git -C $repository rev-parse HEAD 'HEAD^{tree}'
    done
}

work() {
    git init -q --bare -b main origin.git
    git clone -q origin.git near 2> said
    cd near
    ln -s d1 link
    printf '#!/bin/sh\necho ran\n' > run
    chmod +x run
    head -c 300000 /dev/urandom > blob
    commit main 25
    git push -q origin main
    # A branch that is rebased, with a conflict in the middle that is resolved.
    git checkout -q -b topic HEAD~15
    commit topic 10
    echo mine > run
    git commit -qam "topic changes run"
    git checkout -q main
    echo theirs > run
    git commit -qam "main changes run"
    git checkout -q topic
    fails git rebase -q main > ../said 2>&1
    echo both > run
    git add run
    git rebase --continue > ../said 2>&1
    test "$(git rev-list --count main..topic)" = 11
    GIT_SEQUENCE_EDITOR="sed -i '3s/pick/squash/'" git rebase -q -i \
        --exec 'test -x d1 && git diff-index --quiet HEAD' HEAD~6
    test "$(git rev-list --count main..topic)" = 10
    # A stash, a merge, a rename, a series of patches.
    echo loose >> all-topic
    echo new > untracked
    git stash -q -u
    test ! -e untracked
    git checkout -q main
    git merge -q --no-ff -m merged topic
    git stash pop -q > ../said
    test "$(cat untracked)" = new
    git add -A
    git commit -qm stashed
    git mv d2 moved
    git rm -q --cached blob
    git commit -qm moved
    echo blob > .gitignore
    git add .gitignore
    git commit -qm ignored
    git format-patch -q -3 -o ../patches
    git checkout -q -b mailed HEAD~3
    git am -q ../patches/*
    test "$(git rev-parse 'HEAD^{tree}')" = "$(git rev-parse 'main^{tree}')"
    git checkout -q main
    git push -q origin main topic mailed
    cd ..
    git clone -q "file://$PWD/origin.git" far
    git -C near worktree add -q ../tree topic
    (cd tree && commit tree 3 && git reset -q --hard HEAD~1 && git clean -qfdx)
    # Loose objects become packs, and unreachable ones are removed.
    git -C near reflog expire --expire=now --all
    git -C near gc -q --prune=now --aggressive
    git -C far repack -adq
    git -C far bundle create -q ../far.bundle --all
    git clone -q -b main far.bundle unbundled
    test "$(git -C unbundled rev-parse HEAD)" = "$(git -C far rev-parse HEAD)"
    git -C far archive HEAD | tar x -C "$(mktemp -d archive.XXXX)"
    diff -r --no-dereference far archive.* --exclude .git
    for repository in near far tree; do git -C $repository status --porcelain; done
    heads > heads
}

holds() {
    heads | diff heads -
    for repository in near far tree; do
        # The index still matches each file (inode number, times, size): diff-files reads no file
        # again.
        git -C $repository diff-files --quiet
        test -z "$(git -C $repository status --porcelain)"
    done
    for repository in origin.git near far; do git -C $repository fsck --strict --full; done
    git -C near worktree list | grep -q "$PWD/tree"
    rm -rf again
    git clone -q near again 2> said
    git -C again fsck --strict
    rm -rf again
}

moved() { # an index knows inode numbers and times of change, which the disk gives anew
    for repository in near far tree; do git -C $repository update-index -q --refresh; done
}

more() {
    git -C near reset -q --hard HEAD~12
    git -C near branch -D mailed
    git -C near reflog expire --expire=now --all
    git -C near gc -q --prune=now
    git -C far rebase -q --root --exec 'git commit -q --amend -m other' main 2> said
    rm -rf tree origin.git/refs
    mv far tree
    echo x > near/.git/config
}
