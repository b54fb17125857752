#!/bin/sh
# Runs the rows of docs/CONTAINERS.md again: `jailfs run` in every kind of container that this
# machine can start.
#
#   cargo build --locked && sudo tests/containers.sh target/debug/jailfs
#
# Needs root, /dev/fuse, and the packages podman, runc, busybox-static and gcc; rows of rootless
# containers need uidmap and an ordinary user with subordinate ids in $ROOTLESS_USER. Nothing is
# downloaded: the container is busybox, jailfs and tests/attacks.c. Every row prints the expected
# and the actual outcome; the exit status says whether they agree. Where the walls stand, the script
# also tries the attacks of SECURITY.md.
set -u
jailfs=$(realpath "${1:?the program}")
work=$(mktemp -d /var/tmp/jailfs-containers-XXXXXX)
chmod 755 "$work"
trap 'rm -rf "$work" /above-the-root' EXIT
: > /above-the-root
failed=0

root=$work/root
mkdir -p "$root"
(cd "$root" && mkdir -p bin dev proc sys tmp var/tmp run etc root/.ssh home/u repo/sub)
cp "$(command -v busybox)" "$root/bin/busybox"
cp "$jailfs" "$root/bin/jailfs"
for applet in sh cat chmod chown cp echo grep id ln ls mkdir mount mv printf rm sed sleep stat \
    touch true; do ln -s busybox "$root/bin/$applet"; done
gcc -static -O1 -w -o "$root/bin/attacks" "$(dirname "$0")/attacks.c" || exit 2
cp "$(command -v setpriv)" "$root/bin/setpriv"
paths='/^\t/ { for (i = 1; i <= NF; i++) if ($i ~ /^\//) print $i }'
for library in $(ldd "$jailfs" "$root/bin/setpriv" | awk "$paths"); do
    mkdir -p "$root/$(dirname "$library")"
    cp -L "$library" "$root/$library"
done
printf 'root:x:0:0::/root:/bin/sh\nu:x:1000:1000::/home/u:/bin/sh\n' > "$root/etc/passwd"
echo one > "$root/repo/a"
echo SECRET > "$root/root/.ssh/id"
chmod 1777 "$root/tmp" "$root/var/tmp"
mknod -m 666 "$work/fuse" c 10 229

# The work of a command in its sandbox. It prints "safe" only if each step ended as required.
cat > "$root/probe.sh" <<'PROBE'
cd /repo
/bin/jailfs run --discard "$@" -- sh -c '
    echo two >> a && rm -rf sub && /bin/jailfs status >/dev/null || exit 9
    touch /etc/x 2>/dev/null && exit 8
    cat /root/.ssh/id 2>/dev/null && exit 7
    mount -t tmpfs t /tmp 2>/dev/null && exit 6
    echo safe' 2>/tmp/said
code=$?
[ "$(cat a)" = one ] || echo "the base was changed"
sed -n 's/^jailfs: confined by /by /p; s/^jailfs: error: /error: /p' /tmp/said
exit $code
PROBE

# Tries the attacks of SECURITY.md. It prints "held" only if none succeeded.
cat > "$root/attacks.sh" <<'ATTACKS'
cd /repo
held=held
went_well() { echo "attack went well: $*"; held=; }
run() { /bin/jailfs run "$@" 2>/tmp/said; }
before=$(stat -c '%a %u' /bin/busybox; cat /proc/sys/kernel/core_pattern)
run --discard -- sh -c 'echo evil > /proc/sys/kernel/core_pattern; echo h > /proc/sysrq-trigger
    chmod 4755 /bin/busybox; chown 7 /bin/busybox; rm /etc/passwd; true' || went_well 1, not run
[ "$(stat -c '%a %u' /bin/busybox; cat /proc/sys/kernel/core_pattern)" = "$before" ] || went_well 1
[ -e /etc/passwd ] || went_well 1
run --discard -- /bin/attacks climb && went_well 2
echo log > /tmp/log; chmod 644 /tmp/log
run --discard -- sh -c 'chmod 4755 /proc/self/fd/1; chown 7 /proc/self/fd/1; true' >> /tmp/log
[ "$(stat -c '%a %u' /tmp/log)" = "644 $(id -u)" ] || went_well 3
run --apply -- sh -c 'cp /bin/busybox evil; chmod 4755 evil' && went_well 4
[ ! -e evil ] || went_well 4
/bin/jailfs diff | grep -q 'evil .gains the setuid bit.' || went_well 4, not marked
/bin/jailfs discard >/dev/null || went_well 4, not discarded
run --keep -- sh -c 'mkdir -p .git/hooks; echo evil > .git/hooks/pre-commit
    /bin/jailfs checkpoint' || went_well 5, not run
/bin/jailfs diff | grep -q 'pre-commit .protected.' || went_well 5
/bin/jailfs apply >/dev/null 2>&1 && went_well 5
/bin/jailfs discard >/dev/null
[ -z "$(/bin/jailfs diff)" ] || went_well 5, not discarded
run --discard -- sh -c 'n=dddddddddddddddddddddddddddddddddddddddddddddddddd; n=$n$n$n$n; i=0
    while [ $i -lt 300 ]; do mkdir $n; cd $n; i=$((i+1)); done' || went_well 6
[ -z "$(/bin/jailfs diff)" ] || went_well 6
run --discard -- /bin/attacks keys && went_well 7
run --keep -- sh -c 'echo x > "$(printf "\\033[2J")"' || went_well 8, not run
/bin/jailfs diff | grep -q "$(printf '\033')" && went_well 8
/bin/jailfs discard >/dev/null
run --discard --max-bytes 1M -- /bin/attacks renames && went_well 9
run --discard -- sh -c 'exec /bin/attacks hold "$JAILFS_SANDBOX/control"' & sleep 2
/bin/jailfs status >/dev/null || went_well 10
wait
[ "$(cat a)" = one ] && echo $held
ATTACKS

# As Docker's default profile does without CAP_SYS_ADMIN.
cat > "$work/strict.json" <<'PROFILE'
{"defaultAction":"SCMP_ACT_ALLOW","syscalls":[{"names":["unshare","setns","mount","umount2",
"pivot_root","fsopen","fsmount","move_mount","open_tree","mount_setattr"],
"action":"SCMP_ACT_ERRNO","errnoRet":1}]}
PROFILE

check() { # NAME EXPECTED-CODE EXPECTED-TEXT COMMAND...
    name=$1 code=$2 text=$3
    shift 3
    said=$("$@" 2>&1)
    got=$?
    printf '%s\n    %s\n' "$name" "$(echo "$said" | tr '\n' ';')"
    if [ $got != "$code" ] || ! echo "$said" | grep -q "$text"; then
        echo "    NOT AS EXPECTED: status $got instead of $code, or no '$text'"
        failed=1
    fi
}

podman() {
    command podman --runtime runc --cgroup-manager cgroupfs run --rm --network none \
        --ulimit nofile=1024:1024 --ulimit nproc=1000:1000 "$@"
}
probe="--rootfs $root sh /probe.sh"
attacks="--rootfs $root sh /attacks.sh"
held='^held$'
both='by a view of its own (user, mount.*Landlock'
all_walls="$both [0-9]*, a system call filter, no new privileges$"

# shellcheck disable=SC2086 # the words of $probe are words
{
    check "podman, root, without /dev/fuse" 125 "needs '--device\|no /dev/fuse" podman $probe
    check "podman, root, --device /dev/fuse" 0 "$both.*but the list of processes" \
        podman --device /dev/fuse $probe
    check "podman, root, --device /dev/fuse, --no-net" 0 "net namespaces" \
        podman --device /dev/fuse $probe --no-net
    check "podman, root, --device /dev/fuse, unmask=ALL" 0 "$all_walls" \
        podman --device /dev/fuse --security-opt unmask=ALL $probe
    check "podman, root, --device /dev/fuse, no-new-privileges" 0 "$both" \
        podman --device /dev/fuse --security-opt no-new-privileges $probe
    check "podman, root, --device /dev/fuse, --cap-add SYS_ADMIN" 0 "$both" \
        podman --device /dev/fuse --cap-add SYS_ADMIN $probe
    check "podman, root, --device /dev/fuse, --cap-drop ALL" 125 "neither\|map the ids" \
        podman --device /dev/fuse --cap-drop ALL $probe
    check "podman, root, --device /dev/fuse, a profile as Docker's" 125 "make the namespaces" \
        podman --device /dev/fuse --security-opt "seccomp=$work/strict.json" $probe
    check "podman, root, --privileged" 0 "$all_walls" podman --privileged $probe
    for flags in "" "--security-opt unmask=ALL" "--security-opt no-new-privileges" \
        "--cap-add SYS_ADMIN"; do
        check "attacks: podman, root, --device /dev/fuse $flags" 0 "$held" \
            podman --device /dev/fuse $flags $attacks
    done
    check "attacks: podman, root, --privileged" 0 "$held" podman --privileged $attacks
    mkdir "$work/bound"
    for kind in "its root is no mount" "its root is a mount"; do
        [ "$kind" = "its root is no mount" ] && from=$root || from=$work/bound
        check "attacks: chroot, root, $kind" 0 "$held" unshare -m sh -c "
            [ $from = $root ] || mount --bind $root $from
            mount -t proc proc $from/proc; mount --rbind /dev $from/dev
            HOME=/root PATH=/bin exec $(command -v chroot) $from sh /attacks.sh"
    done
    # A host with the root directory of the containers: entered by pivot_root(2), so no chroot.
    host() { # UID HOME
        unshare -m sh -c "
            mount --bind $root $work/bound; mount -t proc proc $work/bound/proc
            mount --rbind /dev $work/bound/dev
            mount --bind $work/fuse $work/bound/dev/fuse
            cd $work/bound; mkdir -p old; pivot_root . old; cd /; export PATH=/bin HOME=$2
            exec /bin/busybox sh -c 'busybox umount -l /old
            exec /bin/setpriv --reuid $1 --regid $1 --clear-groups sh /attacks.sh'"
    }
    check "attacks: host, root" 0 "$held" host 0 /root
    rm -f "$root"/tmp/*
    chown -R 1000:1000 "$root/repo" "$root/home/u"
    check "podman, --user 1000, /dev/fuse not open to it" 125 "Permission denied" \
        podman --device /dev/fuse --user 1000:1000 --env HOME=/home/u $probe
    check "podman, --user 1000, /dev/fuse open to it" 0 "$both" \
        podman -v "$work/fuse:/dev/fuse" --device-cgroup-rule 'c 10:229 rwm' \
        --user 1000:1000 --env HOME=/home/u $probe
    check "attacks: podman, --user 1000, /dev/fuse open to it" 0 "$held" \
        podman -v "$work/fuse:/dev/fuse" --device-cgroup-rule 'c 10:229 rwm' \
        --user 1000:1000 --env HOME=/home/u $attacks
    rm -f "$root"/tmp/*
    check "attacks: host, user 1000" 0 "$held" host 1000 /home/u
    rm -f "$root"/tmp/*
    check "chroot, user 1000" 125 "make the namespaces" unshare -m sh -c "
        mount -t proc proc $root/proc; mount --rbind /dev $root/dev
        mount --bind $work/fuse $root/dev/fuse
        HOME=/home/u PATH=/bin exec $(command -v chroot) --userspec=1000:1000 $root sh /probe.sh"
    if [ -n "${ROOTLESS_USER:-}" ]; then
        rm -f "$root/tmp/said"
        chown -R "$ROOTLESS_USER" "$root"
        mkdir "$work/run" && chown "$ROOTLESS_USER" "$work/run"
        rootless="su $ROOTLESS_USER -s /bin/sh -c"
        line="export XDG_RUNTIME_DIR=$work/run
              podman --runtime runc --cgroup-manager cgroupfs run --rm --network none \
              --ulimit nofile=1024:1024 --device /dev/fuse --rootfs $root sh /probe.sh"
        check "podman, rootless, --device /dev/fuse" 0 "$both" \
            unshare -m sh -c "mount --bind $work/fuse /dev/fuse; $rootless '$line'; code=\$?
            $rootless 'podman system migrate' 2>/dev/null; exit \$code"
    fi
}
exit $failed
