#!/bin/sh
# Runs the rows of docs/CONTAINERS.md again: `jailfs run` in containers of every kind that this machine can start.
#
#   cargo build --locked && sudo tests/containers.sh target/debug/jailfs
#
# Needs root, /dev/fuse, and the packages podman, runc and busybox-static; rows of rootless containers need uidmap and an
# ordinary user with subordinate ids in $ROOTLESS_USER. Nothing is downloaded: the container is busybox and jailfs. Every row
# prints what was expected and what came of it; the exit status says whether they agree.
set -u
jailfs=$(realpath "${1:?the program}")
work=$(mktemp -d /var/tmp/jailfs-containers-XXXXXX)
chmod 755 "$work"
trap 'rm -rf "$work"' EXIT
failed=0

root=$work/root
mkdir -p "$root"
(cd "$root" && mkdir -p bin dev proc sys tmp var/tmp run etc root/.ssh home/u repo/sub)
cp "$(command -v busybox)" "$root/bin/busybox"
cp "$jailfs" "$root/bin/jailfs"
for applet in sh cat echo grep id ls mount rm sed touch true; do ln -s busybox "$root/bin/$applet"; done
for library in $(ldd "$jailfs" | grep -o '/[^ ]*'); do
    mkdir -p "$root/$(dirname "$library")"
    cp -L "$library" "$root/$library"
done
printf 'root:x:0:0::/root:/bin/sh\nu:x:1000:1000::/home/u:/bin/sh\n' > "$root/etc/passwd"
echo one > "$root/repo/a"
echo SECRET > "$root/root/.ssh/id"
chmod 1777 "$root/tmp" "$root/var/tmp"
mknod -m 666 "$work/fuse" c 10 229

# What a command does in its sandbox. It says "safe" only if all of it went as it must.
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

# As Docker's default profile does without CAP_SYS_ADMIN.
cat > "$work/strict.json" <<'PROFILE'
{"defaultAction":"SCMP_ACT_ALLOW","syscalls":[{"names":["unshare","setns","mount","umount2","pivot_root","fsopen",
"fsmount","move_mount","open_tree","mount_setattr"],"action":"SCMP_ACT_ERRNO","errnoRet":1}]}
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
both='by a view of its own (user, mount.*Landlock'

# shellcheck disable=SC2086 # the words of $probe are words
{
    check "podman, root, without /dev/fuse" 125 "needs '--device\|no /dev/fuse" podman $probe
    check "podman, root, --device /dev/fuse" 0 "$both.*but the list of processes" podman --device /dev/fuse $probe
    check "podman, root, --device /dev/fuse, --no-net" 0 "net namespaces" podman --device /dev/fuse $probe --no-net
    check "podman, root, --device /dev/fuse, unmask=ALL" 0 "$both [0-9]*, a system call filter, no new privileges$" \
        podman --device /dev/fuse --security-opt unmask=ALL $probe
    check "podman, root, --device /dev/fuse, no-new-privileges" 0 "$both" \
        podman --device /dev/fuse --security-opt no-new-privileges $probe
    check "podman, root, --device /dev/fuse, --cap-add SYS_ADMIN" 0 "$both" \
        podman --device /dev/fuse --cap-add SYS_ADMIN $probe
    check "podman, root, --device /dev/fuse, --cap-drop ALL" 125 "neither\|map the numbers" podman --device /dev/fuse --cap-drop ALL $probe
    check "podman, root, --device /dev/fuse, a profile as Docker's" 125 "make the namespaces" \
        podman --device /dev/fuse --security-opt "seccomp=$work/strict.json" $probe
    check "podman, root, --privileged" 0 "$both [0-9]*, a system call filter, no new privileges$" podman --privileged $probe
    rm -f "$root/tmp/said"
    chown -R 1000:1000 "$root/repo" "$root/home/u"
    check "podman, --user 1000, /dev/fuse not open to it" 125 "Permission denied" \
        podman --device /dev/fuse --user 1000:1000 --env HOME=/home/u $probe
    check "podman, --user 1000, /dev/fuse open to it" 0 "$both" \
        podman -v "$work/fuse:/dev/fuse" --device-cgroup-rule 'c 10:229 rwm' --user 1000:1000 --env HOME=/home/u $probe
    if [ -n "${ROOTLESS_USER:-}" ]; then
        rm -f "$root/tmp/said"
        chown -R "$ROOTLESS_USER" "$root"
        mkdir "$work/run" && chown "$ROOTLESS_USER" "$work/run"
        rootless="su $ROOTLESS_USER -s /bin/sh -c"
        line="export XDG_RUNTIME_DIR=$work/run; podman --runtime runc --cgroup-manager cgroupfs run --rm --network none \
              --ulimit nofile=1024:1024 --device /dev/fuse --rootfs $root sh /probe.sh"
        check "podman, rootless, --device /dev/fuse" 0 "$both" \
            unshare -m sh -c "mount --bind $work/fuse /dev/fuse; $rootless '$line'; code=\$?; $rootless 'podman system migrate' 2>/dev/null; exit \$code"
    fi
}
exit $failed
