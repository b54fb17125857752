//! The walls of `jailfs run`, tested from inside, as root and as an ordinary user.
//!
//! The scripts run in a mount namespace in which the place of the test is `/srv`. The base must not
//! be below `/tmp`, which a command never sees. Every line of a script must succeed; `no COMMAND`
//! must fail.

use std::fs;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::{PermissionsExt, chown, symlink};
use std::os::unix::net::{SocketAddr, UnixListener};

use crate::place::{JAILFS, Place, Said, said};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Account {
    Root,
    User,
}

pub const ACCOUNTS: [Account; 2] = [Account::Root, Account::User];

/// A place whose home has secrets and other sandboxes.
pub fn place() -> Place {
    let place = Place::new();
    fs::set_permissions(place.root(), PermissionsExt::from_mode(0o755)).unwrap();
    for dir in
        ["home/.ssh", "home/.config/gcloud", "home/.local/state/jailfs/other-1", "home/src", "out"]
    {
        fs::create_dir_all(place.at(dir)).unwrap();
    }
    for (path, text) in [
        ("home/.ssh/id", "SECRET"),
        ("home/.netrc", "SECRET"),
        ("home/.config/gcloud/token", "SECRET"),
        ("home/.config/plain", "plain"),
        ("home/.local/state/jailfs/other-1/format", "SECRET"),
        ("home/src/file", "source"),
        ("host-file", "host"),
    ] {
        place.write(path, text);
    }
    // A copy, because the build directory may be closed to other users.
    fs::copy(JAILFS, place.at("jailfs")).unwrap();
    place
}

/// Runs a script in `/srv/base`, which is the base of the place.
pub fn at_srv(place: &Place, account: Account, script: &str) -> Said {
    let given = if account == Account::User { "65534:65534" } else { "0:0" };
    let own =
        said(place.command("", "chown").args(["-R", given, "base", "home", "out", "host-file"]));
    assert_eq!(own.code, 0, "{own:?}");
    place.write(
        "script",
        format!("no() {{ if \"$@\"; then echo \"it went well: $*\" >&2; exit 99; fi; }}\n{script}"),
    );
    let user = match account {
        Account::Root => "",
        Account::User => "setpriv --reuid 65534 --regid 65534 --clear-groups",
    };
    let prepare = "mknod fuse c 10 229 && chmod 666 fuse && mount --bind fuse /dev/fuse && \
        rm fuse && mount --bind . /srv";
    let mut command = place.command("", "unshare");
    command
        .env("JAILFS", "/srv/jailfs")
        .env("HOME", "/srv/home")
        .env("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin");
    said(command.args([
        "-m",
        "sh",
        "-ec",
        &format!("{prepare}; cd /srv/base; exec {user} sh -eu ../script"),
    ]))
}

/// As [`at_srv`], for a script inside the walls, as each kind of user, each in a new place.
fn inside(options: &str, script: &str) {
    for account in ACCOUNTS {
        let place = place();
        place.write(
            "inside",
            format!(
                "no() {{ if \"$@\"; then echo \"it went well: $*\" >&2; exit 99; fi; }}\n{script}"
            ),
        );
        // The shell reads the script before it is inside the walls.
        let said = at_srv(
            &place,
            account,
            &format!("exec $JAILFS run --discard {options} -- sh -euc \"$(cat ../inside)\""),
        );
        assert_eq!(said.code, 0, "{account:?}: {}\n{}", said.out, said.err);
    }
}

#[test]
fn the_host_is_read_only_and_the_sandbox_and_private_directories_are_writable() {
    inside(
        "",
        r#"
        echo x > a; mkdir d; echo y > d/y; mv d/y z; ln -s a l; ln a h
        for dir in /tmp /var/tmp /dev/shm; do echo x > $dir/x; done
        for dir in / /etc /usr /usr/bin /var /var/lib /home /root /run /dev /sys /proc /srv /opt \
            /srv/home; do
            no sh -c "echo x > $dir/jailfs-test-x" 2>/dev/null
        done
        no sh -c 'echo x >> /srv/host-file' 2>/dev/null; no rm /srv/host-file 2>/dev/null
        no chmod 777 /srv/host-file 2>/dev/null; no touch /srv/host-file 2>/dev/null
        [ "$(cat /srv/host-file)" = host ]; [ "$(cat /srv/home/src/file)" = source ]
        "#,
    );
}

#[test]
fn secrets_and_stores_are_hidden() {
    inside(
        "",
        r#"
        [ -z "$(ls -A $HOME/.ssh)" ]; [ -z "$(cat $HOME/.netrc)" ]
        [ -z "$(ls -A $HOME/.config/gcloud)" ]
        [ "$(cat $HOME/.config/plain)" = plain ]
        [ "$(ls $HOME/.local/state/jailfs)" = "${JAILFS_SANDBOX##*/}" ]
        [ "$(ls -A $JAILFS_SANDBOX)" = control ]
        no grep -rs SECRET $HOME
        no grep -s . /etc/shadow
        $JAILFS status >/dev/null; $JAILFS checkpoint in >/dev/null
        "#,
    );
}

#[test]
fn the_caller_chooses_what_is_shown_hidden_and_bound() {
    inside(
        "--show /srv/home/.config/gcloud --show /srv/home/.ssh/id --hide /srv/home/src --hide \
         /srv/host-file --bind-rw /srv/out",
        r#"
        [ "$(cat $HOME/.config/gcloud/token)" = SECRET ]
        no sh -c "echo > $HOME/.config/gcloud/token" 2>/dev/null
        [ "$(ls $HOME/.ssh)" = id ]; [ "$(cat $HOME/.ssh/id)" = SECRET ]
        [ -z "$(cat $HOME/.netrc)$(ls -A $HOME/src)$(cat /srv/host-file)" ]
        echo x > /srv/out/x; mv /srv/out/x /srv/out/y
        "#,
    );
    inside(
        "--bind-rw /srv/home",
        r#"
        echo x > $HOME/new; mkdir $HOME/.config/new; echo y >> $HOME/src/file
        no grep -rs SECRET $HOME; no sh -c "echo x > $HOME/.ssh/x" 2>/dev/null
        "#,
    );
    let place = place();
    for (options, reason) in [
        ("--show /srv/base/sub", "it lies in the sandbox"),
        ("--bind-rw /srv/base", "it lies in the sandbox"),
        ("--hide /srv/missing", "No such file"),
    ] {
        let said = at_srv(&place, Account::Root, &format!("exec $JAILFS run {options} true"));
        assert!(said.code == 125 && said.err.contains(reason), "{options}: {said:?}");
    }
    // Other users' files below /tmp can be requested. The program itself is visible wherever it is.
    let script = "cat ../home/src/file; ls ..; ls /tmp";
    let said = place.run(&format!("--bind-ro {}", place.at("home").display()), script);
    let name = place.root().file_name().unwrap().to_str().unwrap().to_owned();
    let program = std::path::Path::new(env!("CARGO_BIN_EXE_jailfs")).strip_prefix("/tmp").ok();
    let beside =
        program.and_then(|path| path.components().next()).map(|first| first.as_os_str().to_owned());
    let seen: Vec<&str> = said
        .out
        .lines()
        .filter(|line| beside.as_ref().is_none_or(|beside| beside != line))
        .collect();
    assert_eq!((said.code, seen), (0, vec!["sourcebase", "home", &name]), "{}", said.err);
}

#[test]
fn a_base_anywhere_works_and_shows_only_itself() {
    for account in ACCOUNTS {
        let place = place();
        fs::create_dir_all(place.at("home/.config/gcloud/project")).unwrap();
        place.write("home/.config/gcloud/project/file", "mine");
        symlink("/srv/home/.config/gcloud/project", place.at("home/link")).unwrap();
        let said = at_srv(
            &place,
            account,
            r#"
            cd /srv/home/.config/gcloud/project
            $JAILFS run --discard -- sh -euc '[ $(cat file) = mine ]; [ "$(ls -A ..)" = project ]
            echo > new; [ "$PWD" = "$JAILFS_ROOT" ]'
            cd /srv/home/link
            $JAILFS run --discard -- sh -euc '[ $(cat file) = mine ]; [ "$(ls -A ..)" = project ]
            echo > new'
            cd /srv/home; export XDG_STATE_HOME=/srv/out
            $JAILFS run --discard -- sh -euc '[ -z "$(ls -A .ssh)$(cat .netrc)" ]
            echo x >> src/file; ! grep -rs SECRET .; ! ls -A /srv/out/jailfs | grep -v home-'
            grep -q SECRET .ssh/id; [ "$(cat src/file)" = source ]
            for dir in /dev/shm /var/tmp /tmp; do
                dir=$(mktemp -d $dir/jailfs-test-XXXXXX); cd $dir; echo x > f
                $JAILFS run --discard -- sh -euc '[ $(cat f) = x ]; echo > new
                [ "$(ls -A ..)" = "${PWD##*/}" ]'
                [ "$(ls)" = f ]; rm -r $dir
            done
            "#,
        );
        assert_eq!(said.code, 0, "{account:?}: {}\n{}", said.out, said.err);
    }
    assert_eq!(Place::new().say("", "-C /proc run true").code, 125);
}

#[test]
fn a_command_can_neither_mount_nor_uncover_nor_gain_anything() {
    inside(
        "",
        r#"
        no mount -t tmpfs t /mnt 2>/dev/null
        for copied_up in /tmp /run /dev $HOME/.ssh /proc "$PWD"
        do no umount -l $copied_up 2>/dev/null; done
        no mount -o remount,rw / 2>/dev/null; no mount -o remount,bind,rw / 2>/dev/null
        no unshare -Urm sh -c 'umount -l /tmp || umount -l $HOME/.ssh ||
        mount -o remount,bind,rw / || mount -t tmpfs t /mnt || mount --bind / /mnt' 2>/dev/null
        no unshare -m true 2>/dev/null
        grep -q '^NoNewPrivs:.*1' /proc/self/status
        grep -q '^CapAmb:.*0000000000000000' /proc/self/status
        caps=$((0x$(sed -n 's/^CapBnd:.//p' /proc/self/status)))
        # Neither mounting, nor modules, nor raw devices, nor tracing others, nor another's network.
        for cap in 2 12 13 16 17 19 21 22 25; do [ $((caps >> cap & 1)) = 0 ]; done
        no sh -c 'mknod /tmp/disk b 8 0 && cat /tmp/disk' 2>/dev/null
        for file in kernel/core_pattern kernel/hostname vm/overcommit_memory; do
            [ ! -e /proc/sys/$file ] || no sh -c "cat /proc/sys/$file > /proc/sys/$file" 2>/dev/null
        done
        no sh -c 'echo b > /proc/sysrq-trigger' 2>/dev/null
        no dd if=/proc/kcore of=/dev/null bs=1 count=1 2>/dev/null ||
        [ -z "$(head -c 1 /proc/kcore)" ]
        no ls /dev/fuse /dev/mem 2>/dev/null
        "#,
    );
}

#[test]
fn processes_outside_are_neither_visible_nor_reachable() {
    inside(
        "",
        r#"
        # The first process, this shell, and what it runs just now.
        [ "$(ls /proc | grep -c '^[0-9]*$')" -le 5 ]
        [ "$$" -lt 10 ]; kill -9 1; kill -STOP 1; [ -d /proc/1 ]
        no ls /proc/1/root/ 2>/dev/null; no readlink /proc/1/fd/0 2>/dev/null
        no readlink /proc/1/exe 2>/dev/null
        no sh -c 'echo x > /proc/1/exe' 2>/dev/null; no sh -c ': < /proc/1/fd/0' 2>/dev/null
        no sh -c 'cat /proc/1/environ' 2>/dev/null
        "#,
    );
    // The command is in the process group of its caller: only the command may be hit.
    let place = Place::new();
    let said =
        place.sh("base", "$JAILFS run --keep -- sh -c 'kill -TERM 0; sleep 5' || echo code $?");
    assert_eq!(said.out, "code 143\n", "{}", said.err);
}

#[test]
fn sockets_of_the_host_are_unreachable() {
    let place = place();
    let _path = UnixListener::bind(place.at("socket")).unwrap();
    let name = format!("jailfs-test-{}", std::process::id());
    let address = SocketAddr::from_abstract_name(&name).unwrap();
    let _abstract = UnixListener::bind_addr(&address).unwrap();
    fs::set_permissions(place.at("socket"), PermissionsExt::from_mode(0o777)).unwrap();
    let connect = format!(
        "import socket\nfor address in ['{}', '\\0{name}']:\n    try:\n        \
         socket.socket(socket.AF_UNIX).connect(address)\n        print('connected')\n    except \
         OSError as error:\n        print('refused')\n",
        place.at("socket").display()
    );
    place.write("base/connect.py", &connect);
    assert_eq!(place.sh("base", "python3 connect.py").out, "connected\nconnected\n");
    assert_eq!(place.run("", "python3 connect.py").out, "refused\nrefused\n");
    // Also one in a part of the host that is shown.
    place.write("base/connect.py", connect.replace(place.root().to_str().unwrap(), "/srv/out"));
    let listen = "import socket, time\nlistener = socket.socket(socket.AF_UNIX)\n\
        listener.bind('/srv/out/socket')\n\
        listener.listen()\nopen('/srv/out/ready', 'w')\ntime.sleep(20)";
    place.write("listen.py", listen);
    let script = "python3 ../listen.py & while [ ! -e ../out/ready ]; do sleep 0.01; done; \
        python3 connect.py
                  $JAILFS run --keep -- python3 connect.py
                  $JAILFS run --show /srv/out/socket -- python3 connect.py; kill $!";
    let said = at_srv(&place, Account::Root, script);
    let connects =
        "connected\nconnected\n".to_owned() + "refused\nrefused\n" + "connected\nrefused\n";
    assert_eq!(said.out, connects, "{}", said.err);
}

#[test]
fn inherited_descriptors_are_no_way_out() {
    let place = place();
    place.write("host-file", "host\n");
    let said = place.sh(
        "base",
        r#"
        exec 7</ 8<../host-file 9>../out/log
        $JAILFS run --discard -- sh -uc '
            ls /proc/self/fd/7/etc >/dev/null 2>&1 && echo "a directory was inherited"
            cat <&8; echo logged >&9; true'
        "#,
    );
    assert_eq!((said.code, said.out.as_str()), (0, "host\n"), "{}", said.err);
    assert_eq!(
        (place.read("host-file").as_str(), place.read("out/log").as_str()),
        ("host\n", "logged\n")
    );
}

#[test]
fn symlinks_in_the_view_keep_their_meaning() {
    let place = Place::new();
    for (link, target) in
        [("abs", "/etc/hostname"), ("up", "../../../../../../etc/hostname"), ("own", "sub/../a")]
    {
        symlink(target, place.at("base").join(link)).unwrap();
    }
    let host = fs::read_to_string("/etc/hostname").unwrap();
    let said = place.run(
        "--keep",
        "readlink abs up own; cat abs up own; git init -q . && git add -A && \
         git status --short | grep -c 'A '",
    );
    let texts = "/etc/hostname\n../../../../../../etc/hostname\nsub/../a\n";
    assert_eq!((said.code, said.out), (0, format!("{texts}{host}{host}one\n6\n")), "{}", said.err);
    // Outside, in a mount that other processes see, they do not lead out.
    place.mount();
    assert_ne!(place.sh("mnt", "cat abs").code, 0);
}

#[test]
fn without_a_network_there_is_a_loopback() {
    inside(
        "--no-net",
        r#"
        [ "$(tail -n +3 /proc/net/dev | cut -d: -f1 | tr -d ' ')" = lo ]
        python3 -c "
import socket
server = socket.create_server(('127.0.0.1', 0))
socket.create_connection(server.getsockname()).close()
try:
    socket.create_connection(('192.0.2.1', 9), 1)
    raise SystemExit('there is a network')
except OSError:
    pass
"
        "#,
    );
}

#[test]
fn environment_variables_tell_the_command_where_it_is() {
    let place = Place::new();
    let mut command = place.command("base", JAILFS);
    command
        .env("TOKEN", "secret")
        .env("SSH_AUTH_SOCK", "/tmp/agent")
        .env("TMPDIR", place.at("home"));
    let script = "echo ${TOKEN-} ${SSH_AUTH_SOCK-} ${TMPDIR-} $JAILFS_ATTEMPT; \
        [ $JAILFS_ROOT = $PWD ]; [ -S $JAILFS_SANDBOX/control ]; cat $JAILFS_README";
    let said = said(command.args(["run", "--", "sh", "-euc", script]));
    assert!(said.code == 0 && said.out.starts_with("secret 1\nYou are in a sandbox"), "{said:?}");
    for part in [place.at("base").to_str().unwrap(), "--bind-rw DIR", "--show PATH", "/etc/shadow"]
    {
        assert!(said.out.contains(part), "{part}: {}", said.out);
    }
    let mut command = place.command("base", JAILFS);
    let cleared = command.env("TOKEN", "secret").args(["run", "--env-clear", "--", "env"]);
    let cleared = crate::place::said(cleared).out;
    let names: Vec<_> = cleared.lines().filter_map(|line| line.split('=').next()).collect();
    assert!(
        names.contains(&"HOME") && names.contains(&"JAILFS_ROOT") && !cleared.contains("secret"),
        "{cleared}"
    );
    assert!(
        names.iter().all(|name| name.starts_with("JAILFS_")
            || name.starts_with("LC_")
            || *name == "PWD"
            || ["HOME", "LANG", "LOGNAME", "PATH", "SHELL", "TERM", "TZ", "USER"].contains(name)),
        "{names:?}"
    );
}

#[test]
fn root_is_root_over_files_and_owners_keep_their_numbers() {
    let place = Place::new();
    fs::set_permissions(place.root(), PermissionsExt::from_mode(0o755)).unwrap();
    chown(place.at("base/sub/b"), Some(1234), Some(5678)).unwrap();
    fs::set_permissions(place.at("base/sub/b"), PermissionsExt::from_mode(0o600)).unwrap();
    let said = place.run(
        "--apply",
        "id -u; stat -c %u:%g sub/b; cat sub/b >/dev/null; chown 4321:8765 sub/b; chown 7:8 a; \
         mkdir open; chmod 777 open; setpriv --reuid 65534 --regid 65534 --clear-groups sh -c 'id \
         -u; echo mine > open/mine; ! cat sub/b 2>/dev/null'; stat -c %u:%g open/mine",
    );
    assert_eq!(
        (said.code, said.out.as_str()),
        (0, "0\n1234:5678\n65534\n65534:65534\n"),
        "{}",
        said.err
    );
    let owners = place.sh("base", "stat -c %u:%g sub/b a open/mine").out;
    assert_eq!(owners, "4321:8765\n7:8\n65534:65534\n");
}

#[test]
fn one_line_names_the_walls_that_stand() {
    for account in ACCOUNTS {
        let said = at_srv(&place(), account, "exec $JAILFS run true");
        assert_eq!(said.code, 0, "{account:?}: {said:?}");
        let line = "jailfs: confined by a view of its own (user, mount, pid, ipc, uts namespaces), \
            Landlock ";
        assert!(said.err.starts_with(line) && !said.err.contains("but"), "{account:?}: {said:?}");
    }
}

/// Leaves a chroot that a process can leave: from a directory outside of its root, `..` leads on.
const CLIMB: &str = "
import os, sys
os.mkdir(sys.argv[1]); os.chroot(sys.argv[1])
for _ in range(64): os.chdir('..')
os.chroot('.')
print(open('/media/marker').read())
";

/// In a chroot, root may not create a user namespace, and chroot(2) leads out of it. The command
/// has a root of its own.
#[test]
fn in_a_chroot_all_walls_stand_and_nothing_above_the_root_is_reachable() {
    // The root directory of the chroot is a mount, or a plain directory.
    let of_mount = "mount --rbind / /mnt; root=/mnt";
    let plain = "mount -t tmpfs t /mnt; mkdir /mnt/root; root=/mnt/root; \
        for dir in bin dev etc lib lib64 proc sys usr; do
                 [ ! -e /$dir ] || { mkdir $root/$dir; mount --rbind /$dir $root/$dir; }; done
                 mkdir -m 1777 $root/tmp $root/srv $root/var $root/run";
    for chroot in [of_mount, plain] {
        let place = place();
        place.write("climb.py", CLIMB);
        place.write(
            "inside",
            r#"
            no() { if "$@"; then echo "it went well: $*" >&2; exit 99; fi; }
            [ "$(id -u)" = 0 ]; chown 7:8 a; [ "$(stat -c %u:%g a)" = 7:8 ]
            no chmod 600 /usr/bin/env 2>/dev/null; no chown 7 /usr/bin/env 2>/dev/null
            no mount -t tmpfs t /srv 2>/dev/null; no umount -l /tmp 2>/dev/null
            no umount -l $HOME/.ssh 2>/dev/null
            no mount -o remount,bind,rw / 2>/dev/null
            no sh -c 'echo x >> /srv/host-file' 2>/dev/null; no grep -rs SECRET $HOME
            for file in kernel/core_pattern vm/overcommit_memory
            do no sh -c "cat /proc/sys/$file > /proc/sys/$file" 2>/dev/null; done
            no sh -c 'echo b > /proc/sysrq-trigger' 2>/dev/null
            no mknod /tmp/disk b 8 0 2>/dev/null; no cat /dev/mem 2>/dev/null
            no readlink /proc/1/root 2>/dev/null; [ "$(ls /proc | grep -c '^[0-9]*$')" -le 5 ]
            no python3 -c "$CLIMB" /tmp/below 2>/dev/null
            "#,
        );
        let line = format!(
            "{chroot}; mount --bind . $root/srv; mount -t tmpfs t /media; \
             echo OUTSIDE > /media/marker; export CLIMB=\"$(cat climb.py)\"
             chroot $root python3 -c \"$CLIMB\" /srv/below
             exec chroot $root sh -euc 'cd /srv/base
             exec $JAILFS run --discard -- sh -euc \"$(cat ../inside)\"'"
        );
        let mut command = place.command("", "unshare");
        command.env("JAILFS", "/srv/jailfs").env("HOME", "/srv/home");
        let said = said(command.args(["-m", "sh", "-ec", &line]));
        assert_eq!(said.code, 0, "{chroot}: {}\n{}", said.out, said.err);
        assert_eq!(said.out, "OUTSIDE\n\n", "{chroot}: only the climb without 'run' gets out");
        assert!(
            said.err.contains("a view of its own (user, mount, pid, ipc, uts namespaces)"),
            "{}",
            said.err
        );
    }
}

/// Adds a key to the user's keyring, prints its number, and waits.
const PLANT: &str = "
import ctypes, sys
libc = ctypes.CDLL(None, use_errno=True)
key = libc.syscall(248, b'user', b'jailfs-test', b'PLANTED', 7, -4)
assert key > 0, ctypes.get_errno()
# The possessor and the user may do everything.
assert libc.syscall(250, 5, key, 0x3f3f0000) == 0
print(key, flush=True); sys.stdin.read()
libc.syscall(250, 21, key)
";

/// Reads a key by its number; this needs no path.
const READ_KEY: &str = "
import ctypes, sys
libc = ctypes.CDLL(None, use_errno=True)
buffer = ctypes.create_string_buffer(64)
libc.syscall(250, 8, -4, 0)
length = libc.syscall(250, 11, int(sys.argv[1]), buffer, 64)
print(buffer.raw[:length].decode() if length > 0 else 'refused')
";

/// Keyrings belong to the user and not to a namespace, so only the seccomp filter protects them.
#[test]
#[cfg(target_arch = "x86_64")]
fn keys_of_the_host_are_unreachable() {
    use std::io::BufRead;
    let place = Place::new();
    place.write("base/read.py", READ_KEY);
    let mut command = place.command("base", "python3");
    command
        .args(["-c", PLANT])
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped());
    let mut holder = command.spawn().unwrap();
    let mut key = String::new();
    std::io::BufReader::new(holder.stdout.take().unwrap()).read_line(&mut key).unwrap();
    let read = format!("python3 read.py {}", key.trim());
    let outside = place.sh("base", &read).out;
    let (behind, without) = (place.run("", &read).out, place.run("--allow keyrings", &read).out);
    drop(holder.stdin.take());
    holder.wait().unwrap();
    assert_eq!((outside.as_str(), behind.as_str()), ("PLANTED\n", "refused\n"));
    assert_eq!(without, "PLANTED\n", "the key is readable if the filter allows the call");
}

#[test]
fn temporary_files_and_core_dumps_have_limits() {
    let script = r#"
        [ "$(ulimit -c)" = 0 ]; no sh -c 'ulimit -c 1' 2>/dev/null
        for dir in /tmp /var/tmp /dev/shm; do
            [ "$(df -B1 --output=size $dir | tail -n1 | tr -d ' ')" = 8388608 ]
            no dd if=/dev/zero of=$dir/full bs=1M count=9 2>/dev/null; rm $dir/full
        done
    "#;
    inside("--tmp-size 8M", script);
    // By default the three together hold less than the memory of the machine.
    inside(
        "",
        "[ $(($(df -B1K --output=size /tmp | tail -n1) * 3)) -lt $(sed -n 's/^MemTotal: \
         *\\([0-9]*\\) kB/\\1/p' /proc/meminfo) ]",
    );
}

#[test]
fn developer_tools_work_behind_the_filter() {
    inside(
        "",
        r#"
        git init -q . && git add -A && git -c user.name=a -c user.email=b commit -qm x &&
        git -c gc.auto=0 status --porcelain
        python3 -c 'import subprocess, threading, multiprocessing, sqlite3
subprocess.run(["true"], check=True)
t = threading.Thread(target=lambda: None); t.start(); t.join()
p = multiprocessing.Process(target=print); p.start(); p.join(); assert p.exitcode == 0
sqlite3.connect("db").execute("create table t (a)")'
        setarch -R true
        ! command -v node >/dev/null || node -e 'require("fs").readFileSync("/etc/hostname")
        require("child_process").execSync("true")'
        ! command -v gdb >/dev/null || gdb -batch -ex run --args /bin/true 2>/dev/null |
        grep -q 'exited normally'
        ! command -v strace >/dev/null || strace -f -o trace sh -c true
        "#,
    );
    inside("--allow nested-sandbox", "unshare -U true");
    inside("", "no unshare -U true 2>/dev/null");
}

/// Makes unshare(2) fail with EPERM, as container profiles and kernels without user namespaces do,
/// and executes the rest of the line.
const REFUSE_NAMESPACES: &str = r#"
import ctypes, os, struct, sys
number = {'x86_64': 272, 'aarch64': 97}[os.uname().machine]
lines = [(0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7fff0000)]
program = b''.join(struct.pack('HBBI', *line) for line in lines)
class Program(ctypes.Structure):
    _fields_ = [('len', ctypes.c_ushort), ('filter', ctypes.c_char_p)]
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(22, 2, ctypes.byref(Program(len(lines), program)), 0, 0) == 0, ctypes.get_errno()
os.execvp(sys.argv[1], sys.argv[1:])
"#;

/// Runs a script in `/srv/base` as [`at_srv`] does, where namespaces are not allowed.
pub fn without_namespaces(place: &Place, account: Account, script: &str) -> Said {
    place.write("refuse.py", REFUSE_NAMESPACES);
    place.write("script", script);
    // Root installs the filter, so that fusermount3 keeps its privileges.
    let prepare = "mknod fuse c 10 229 && chmod 666 fuse && mount --bind fuse /dev/fuse && \
        rm fuse && mount --bind . /srv";
    let (user, given) = match account {
        Account::Root => ("", "0:0"),
        Account::User => ("setpriv --reuid 65534 --regid 65534 --clear-groups", "65534:65534"),
    };
    let own = said(place.command("", "chown").args(["-R", given, "base", "home", "out"]));
    assert_eq!(own.code, 0, "{own:?}");
    let line =
        format!("{prepare}; cd /srv/base; exec python3 ../refuse.py {user} sh -eu ../script");
    let mut command = place.command("", "unshare");
    command.env("JAILFS", "/srv/jailfs").env("HOME", "/srv/home");
    command.env("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin");
    said(command.args(["-m", "sh", "-ec", &line]))
}

#[test]
fn without_namespaces_only_landlock_stands_and_a_message_says_so() {
    {
        let (account, place) = (Account::User, place());
        let script = r#"
            no() { if "$@"; then echo "it went well: $*" >&2; exit 99; fi; }
            [ "$PWD" = "$JAILFS_ROOT" ]; [ "$PWD" != /srv/base ]; [ "${PWD##*/}" = base ]
            [ -d "$TMPDIR" ]
            echo two >> a; mkdir d; mv a d/a; echo x > "$TMPDIR/x"; echo x > /dev/null
            no sh -c 'echo x >> /srv/base/a' 2>/dev/null
            no sh -c 'echo x > /srv/out/x' 2>/dev/null; no sh -c 'echo x > /tmp/x' 2>/dev/null
            no cat /srv/home/.ssh/id 2>/dev/null; no cat /srv/home/.netrc 2>/dev/null
            no ls /srv/home/.local/state/jailfs/other-1 2>/dev/null
            [ "$(cat /srv/home/src/file)" = source ]; no cat /etc/shadow 2>/dev/null
            no kill -0 $PPID_OUTSIDE 2>/dev/null; no ls /proc/$PPID_OUTSIDE/root/ 2>/dev/null
            (setsid sh -c 'while :; do sleep 1; done' &) ; sleep 0.1; echo done
        "#;
        place.write("inside", script);
        let outside = r#"
            export PPID_OUTSIDE=$$
            $JAILFS run --keep --walls=landlock -- sh -euc "$(cat ../inside)"
            $JAILFS diff base; ! ls -d /tmp/jailfs-run-*/mount/base 2>/dev/null
        "#;
        let said = without_namespaces(&place, account, outside);
        assert_eq!(
            (said.code, said.out.as_str()),
            (0, "done\nA\td/\nR\ta\td/a\n"),
            "{account:?}: {}",
            said.err
        );
        assert!(
            said.err.contains("warning: this host does not allow namespaces: "),
            "{}",
            said.err
        );
        assert!(said.err.contains("confined by Landlock "), "{}", said.err);
        assert!(said.err.contains("; but no namespaces: "), "{}", said.err);
    }
}

/// Root owns the files of the host, and Landlock controls neither their modes nor their owners.
#[test]
fn without_namespaces_a_command_is_refused_unless_the_caller_accepts_less() {
    for (account, options, runs) in [
        (Account::Root, "", false),
        (Account::Root, "--walls=landlock", false),
        (Account::Root, "--walls=view", false),
        (Account::User, "", false),
        (Account::User, "--walls=view", false),
        (Account::User, "--walls=landlock", true),
    ] {
        let place = place();
        let script = format!(
            "code=0; $JAILFS run --keep {options} -- sh -c 'echo ran' || code=$?; echo code $code"
        );
        let said = without_namespaces(&place, account, &script);
        let expected = if runs { "ran\ncode 0\n" } else { "code 125\n" };
        assert_eq!(said.out, expected, "{account:?} {options}: {}", said.err);
        let says_how = said.err.contains("--walls=landlock runs the command without namespaces");
        assert_eq!(
            says_how,
            account == Account::User && !runs,
            "{account:?} {options}: {}",
            said.err
        );
    }
}

#[test]
fn without_namespaces_a_command_that_stops_its_starter_is_ended_in_time() {
    {
        let (account, place) = (Account::User, place());
        place.write("inside", "(setsid sleep 60 &); kill -STOP $PPID; echo > stopped; sleep 60");
        // The timeout ends the shell first. Another test checks for leftovers in /tmp.
        let run = r#"export TMPDIR=/srv/out; code=0
            $JAILFS run --walls=landlock --timeout 1 --keep -- sh -c "$(cat ../inside)" || code=$?
            echo code $code"#;
        let said = without_namespaces(&place, account, run);
        assert_eq!(said.out, "code 124\n", "{account:?}: {}", said.err);
        assert!(
            said.err.contains("the time is over") && said.err.contains("A\tstopped"),
            "{}",
            said.err
        );
    }
}

/// A command creates a symlink in a directory that it can write. The next run does not follow it.
#[test]
fn a_planted_symlink_redirects_no_option() {
    for account in ACCOUNTS {
        let place = place();
        let script = "
            mkdir -p ../home/.ssh ../out/work ../out/real
            $JAILFS run --discard --bind-rw ../out/work -- sh -c 'ln -s /srv/home ../out/work/up
            ln -s /srv/home/.ssh ../out/work/key'
            for option in --bind-rw --bind-ro --show; do
                for path in ../out/work/up ../out/work/up/.ssh ../out/work/key; do
                    code=0; $JAILFS run --discard $option $path -- true 2> ../out/err || code=$?
                    [ $code = 125 ]; grep -q 'it leads through a symlink to' ../out/err
                done
            done
            # A directory that is named directly works, and so does a path that goes up.
            $JAILFS run --discard --bind-rw ../out/./work/../real -- touch ../out/real/made
            [ -e ../out/real/made ]
        ";
        let said = at_srv(&place, account, script);
        assert_eq!(said.code, 0, "{account:?}: {}\n{}", said.out, said.err);
    }
}
