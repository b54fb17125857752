//! Ordinary users: mounts by fusermount3, and `run` in a user namespace.
//!
//! Each test is a shell script of the user `nobody`, in a mount namespace in which all users can
//! open `/dev/fuse`, as on most systems. Every line of the script must succeed.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::fs::chown;

use crate::place::{JAILFS, Place, Said, said};

const USER: u32 = 65534;

/// A place that belongs to that user, with a copy of the program in it.
pub fn place() -> Place {
    let place = Place::new();
    fs::set_permissions(place.root(), PermissionsExt::from_mode(0o755)).unwrap();
    // A copy, because the build directory may be closed to other users.
    fs::copy(JAILFS, place.at("jailfs")).unwrap();
    let given = said(place.command("", "chown").args(["-R", "65534:65534", "base", "mnt", "home"]));
    assert_eq!(given.code, 0, "{given:?}");
    place
}

pub fn as_nobody(place: &Place, script: &str) -> Said {
    as_nobody_after(place, "true", script)
}

/// The same, after root has prepared the mount namespace.
fn as_nobody_after(place: &Place, prepared: &str, script: &str) -> Said {
    place.write("script", script);
    let device = "mknod ../fuse c 10 229 && chmod 666 ../fuse && mount --bind ../fuse /dev/fuse && \
        rm ../fuse";
    let user = "exec setpriv --reuid 65534 --regid 65534 --clear-groups sh -eux ../script";
    let mut command = place.command("mnt", "unshare");
    command
        .env("JAILFS", place.at("jailfs"))
        .env("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin");
    said(command.args([
        "-m",
        "sh",
        "-ec",
        &format!("{device}; {prepared}; cd ..; mkdir -p x; cd x; {user}"),
    ]))
}

#[test]
fn an_ordinary_user_needs_no_options() {
    let place = place();
    let said = as_nobody(
        &place,
        r#"
        cd ..; $JAILFS mount base mnt
        grep -q ' fuse.jailfs .*user_id=65534' /proc/self/mountinfo
        cd mnt; $JAILFS checkpoint green
        echo two >> a; rm del; mkdir n
        [ "$($JAILFS diff)" = "$(printf 'M\ta\nD\tdel\nA\tn/')" ]
        $JAILFS restore green; [ "$(cat a)" = one ]; [ -e del ]; [ ! -e n ]
        echo three >> a; $JAILFS apply; [ "$(tail -n 1 ../base/a)" = three ]
        code=0; $JAILFS umount ../mnt || code=$?; [ $code = 11 ]
        cd ..; $JAILFS umount mnt; ! grep "$PWD/mnt" /proc/self/mountinfo
        $JAILFS mount base mnt
        kill -9 $($JAILFS -C mnt status --json | sed 's/.*"pid":\([0-9]*\).*/\1/')
        while stat -f mnt >/dev/null 2>&1; do :; done
        $JAILFS mount base mnt; cat mnt/a
        kill -9 $($JAILFS -C mnt status --json | sed 's/.*"pid":\([0-9]*\).*/\1/')
        while stat -f mnt >/dev/null 2>&1; do :; done
        $JAILFS umount mnt; ! grep "$PWD/mnt" /proc/self/mountinfo
        "#,
    );
    assert_eq!(said.code, 0, "{}\n{}", said.out, said.err);
}

#[test]
fn an_ordinary_user_runs_a_command_without_a_helper() {
    let place = place();
    let said = as_nobody(
        &place,
        r#"
        cd ../base
        $JAILFS run --keep -- sh -euc '[ "$(id -u):$(id -g)" = 65534:65534 ]
        [ "$PWD" = "$JAILFS_ROOT" ]
            echo two >> a; rm del; $JAILFS checkpoint in; mkdir n; $JAILFS restore in; [ ! -e n ]'
        [ "$(cat a)" = one ]; [ -e del ]
        $JAILFS apply; [ "$(tail -n 1 a)" = two ]; [ ! -e del ]
        $JAILFS run --apply -- sh -c 'echo three >> a'; [ "$(tail -n 1 a)" = three ]
        $JAILFS run --keep -- sh -c '(sleep 20; echo late > late) 2>/dev/null & true' 2> ../home/err
        grep -q 'are ended: .*(sh)' ../home/err; [ -z "$($JAILFS diff base)" ]
        "#,
    );
    assert_eq!(said.code, 0, "{}\n{}", said.out, said.err);
}

#[test]
fn files_of_other_owners_keep_them_through_a_run() {
    let place = place();
    fs::create_dir(place.at("base/roots")).unwrap();
    fs::create_dir(place.at("base/roots/mine")).unwrap();
    place.write("base/shared", "s\n");
    place.write("base/roots-file", "r\n");
    fs::set_permissions(place.at("base/roots-file"), PermissionsExt::from_mode(0o666)).unwrap();
    chown(place.at("base/roots/mine"), Some(USER), Some(USER)).unwrap();
    chown(place.at("base/shared"), Some(USER), Some(7)).unwrap();
    let before = place.sh("base", "stat -c '%n %u:%g %a' roots roots-file shared").out;
    let said = as_nobody(
        &place,
        r#"
        cd ../base
        $JAILFS run --apply -- sh -c 'echo x > roots/mine/new; echo x >> a
            ! echo x 2>/dev/null >> roots-file; ! echo x 2>/dev/null >> shared
            ! rm -f roots-file 2>/dev/null; cat shared'
        [ "$($JAILFS diff base)" = "" ]
        "#,
    );
    assert_eq!(said.code, 0, "{}\n{}", said.out, said.err);
    assert!(place.exists("base/roots/mine/new"));
    assert_eq!(place.sh("base", "stat -c '%n %u:%g %a' roots roots-file shared").out, before);
}

/// A directory without any permission, even for its owner, and read-only directories, like those of
/// Go's module cache.
#[test]
fn directories_that_an_ordinary_user_closed_are_applied_and_rolled_back() {
    let place = place();
    let said = as_nobody(
        &place,
        r#"
        cd ../base; mkdir -p mod/sub; echo old > mod/sub/f; chmod 555 mod/sub mod
        $JAILFS run --apply -- sh -euc 'echo changed > a; chmod 755 mod/sub; rm mod/sub/f
        echo new > mod/sub/g; chmod 555 mod/sub'
        [ "$(cat a mod/sub/g | tr '\n' ' ')" = 'changed new ' ]; [ ! -e mod/sub/f ]
        [ "$(stat -c %a mod mod/sub | tr '\n' ' ')" = '555 555 ' ]
        $JAILFS apply --undo; [ "$(cat a)" = one ]; [ "$(cat mod/sub/f)" = old ]; [ ! -e mod/sub/g ]
        [ "$(stat -c %a mod mod/sub | tr '\n' ' ')" = '555 555 ' ]
        $JAILFS run --keep -- sh -euc 'echo changed > a; mkdir d; echo f > d/f; chmod 000 d
        echo z > z
            python3 -c "import os; os.setxattr(\"z\", \"user.v\", b\"x\" * 60000)"'
        code=0; $JAILFS apply 2> ../home/err || code=$?; [ $code != 0 ]
        [ "$(cat a)" = one ]; [ ! -e d ]; [ ! -e z ]; $JAILFS status
        $JAILFS run --apply -- rm z; [ "$(cat a)" = changed ]; [ "$(stat -c %a d)" = 0 ]; [ ! -e z ]
        chmod -R u+rwx mod d; [ "$(cat d/f)" = f ]
        "#,
    );
    assert_eq!(said.code, 0, "{}\n{}", said.out, said.err);
}

/// Interrupted while the base is written, and rolled back by the next command.
#[test]
fn an_apply_is_rolled_back_although_its_user_may_no_longer_read_write_or_own_its_files() {
    let place = place();
    place.write("base/roots", "root's\n");
    let said = as_nobody(
        &place,
        r#"
        cd ..
        cut() { (cd base; ! JAILFS_FAILPOINTS=kill:base.sync:1 $JAILFS apply; eval "$1"
        $JAILFS status > ../home/status); }

        echo text > base/f; echo first > base/g; ln base/g base/h
        $JAILFS mount base mnt; chmod 000 mnt/f; $JAILFS umount mnt
        cut '[ "$(stat -c %a f)" = 0 ]'; [ "$(stat -c %a base/f)" = 644 ]
        [ "$(cat base/f)" = text ]

        $JAILFS mount base mnt; echo second > mnt/g; chmod 444 mnt/h; $JAILFS umount mnt
        cut '[ "$(cat g)" = second ]'; [ "$(cat base/g base/h | tr '\n' ' ')" = 'first first ' ]
        [ base/g -ef base/h ]; [ "$(stat -c %a base/g)" = 644 ]
        (cd base; $JAILFS discard; $JAILFS run --apply -- sh -c 'chmod 444 g'
        $JAILFS run --apply -- sh -c 'chmod 644 g; echo third > g; chmod 444 g')
        [ "$(cat base/g base/h | tr '\n' ' ')" = 'third third ' ]; [ base/g -ef base/h ]
        [ "$(stat -c %a base/g)" = 444 ]

        $JAILFS mount base mnt; rm -f mnt/roots; echo new > mnt/new; $JAILFS umount mnt
        cut '[ ! -e roots ]'; [ "$(cat base/roots)" = "root's" ]; [ ! -e base/new ]
        (cd base; ! $JAILFS apply > ../home/err 2>&1); grep -q roots home/err
        "#,
    );
    assert_eq!(said.code, 0, "{}\n{}", said.out, said.err);
}

#[test]
fn a_mapped_file_without_permissions_for_its_own_user_is_in_the_checkpoint() {
    // With and without the kernel's list of FUSE connections.
    let at = "/sys/fs/fuse/connections";
    let list = &format!("mountpoint -q {at} || mount -t fusectl none {at}");
    for prepared in [list, &format!("if mountpoint -q {at}; then umount -l {at}; fi")] {
        map_and_close(&place(), prepared);
    }
}

fn map_and_close(place: &Place, prepared: &str) {
    place.write(
        "map.py",
        r#"
import mmap, os, sys
os.makedirs('d/e')
maps = []
for path in ['mapped', 'd/e/mapped']:
    with open(path, 'wb+') as file:
        file.truncate(8192)
        maps.append(mmap.mmap(file.fileno(), 8192))
os.chmod('mapped', 0)
os.chmod('d', 0)
for line in sys.stdin:
    for map in maps:
        map[0:len(line)] = map[5000:5000 + len(line)] = line.encode()
    print('written', flush=True)
"#,
    );
    let said = as_nobody_after(
        place,
        prepared,
        r#"
        cd ..; $JAILFS mount base mnt; mkfifo home/in home/out
        (cd mnt; exec python3 ../map.py < ../home/in > ../home/out) &
        exec 8> home/in 9< home/out
        for n in 1 2 3; do
            echo text$n >&8; read -r written <&9; [ $written = written ]
            $JAILFS -C mnt checkpoint c$n
        done
        $JAILFS -C mnt status | grep -c problem && exit 5
        echo text4 >&8; read -r written <&9
        $JAILFS -C mnt restore c2; chmod 755 mnt/d; chmod 644 mnt/mapped
        for file in mapped d/e/mapped
        do [ "$(grep -ao 'text.' mnt/$file | tr '\n' ' ')" = 'text2 text2 ' ]; done
        exec 8>&- 9<&-; wait
        for n in 1 3; do
            for file in mapped d/e/mapped; do
                [ "$($JAILFS -C mnt show c$n:$file | grep -ao 'text.' | tr '\n' ' ')" = \
                    "text$n text$n " ]
            done
        done
        $JAILFS umount mnt
        "#,
    );
    assert_eq!(said.code, 0, "{}\n{}", said.out, said.err);
}

/// All users may write in a directory of root, but only root can set its times.
#[test]
fn paths_that_an_ordinary_user_cannot_write_are_refused_before_anything_is_written() {
    let place = place();
    fs::create_dir(place.at("base/roots")).unwrap();
    fs::set_permissions(place.at("base/roots"), PermissionsExt::from_mode(0o777)).unwrap();
    let said = as_nobody(
        &place,
        r#"
        cd ../base
        cd ..; $JAILFS mount base mnt; (cd mnt; echo changed > a; echo x > roots/new; echo z > z)
        $JAILFS umount mnt; cd base
        code=0; $JAILFS apply 2> ../home/err || code=$?; cat ../home/err; [ $code = 1 ]
        grep -q "'roots' cannot be written: it belongs to user 0.*nothing is written" ../home/err
        [ "$(cat a)" = one ]; [ ! -e roots/new ]; [ ! -e z ]
        $JAILFS status > ../home/status; ! grep 'not rolled back' ../home/status; $JAILFS log
        $JAILFS apply a z; [ "$(cat a z | tr '\n' ' ')" = 'changed z ' ]
        "#,
    );
    assert_eq!(said.code, 0, "{}\n{}", said.out, said.err);
}

/// Root takes a directory from its owner after an interrupted apply, and gives it back later.
#[test]
fn a_directory_that_root_took_blocks_only_the_next_apply() {
    let place = place();
    let said = as_nobody(
        &place,
        r#"
        cd ../base; mkdir d e; for dir in d e; do echo old > $dir/f; done
        $JAILFS run --keep -- sh -euc 'echo changed > d/f; echo changed > e/f'
        ! JAILFS_FAILPOINTS=kill:base.sync:1 $JAILFS apply
        [ "$(cat d/f e/f | tr '\n' ' ')" = 'changed changed ' ]
        "#,
    );
    assert_eq!(said.code, 0, "{}\n{}", said.out, said.err);
    chown(place.at("base/d"), Some(0), Some(0)).unwrap();
    let said = as_nobody(
        &place,
        r#"
        cd ../base; $JAILFS status > ../home/status; cat ../home/status
        grep -q '^  d/f: its directory may not be written' ../home/status
        ! grep -q '^  e' ../home/status
        [ "$(cat d/f e/f | tr '\n' ' ')" = 'changed old ' ]; [ "$($JAILFS show base:d/f)" = old ]
        $JAILFS log
        cd ..; $JAILFS mount base mnt; [ "$(cat mnt/d/f)" = changed ]
        cd mnt; $JAILFS discard; [ "$(cat d/f)" = old ]; echo mine > e/f
        code=0; $JAILFS apply || code=$?; [ $code = 3 ]
        cd ..; $JAILFS umount mnt
        "#,
    );
    assert_eq!(said.code, 0, "{}\n{}", said.out, said.err);
    chown(place.at("base/d"), Some(USER), Some(USER)).unwrap();
    let said = as_nobody(
        &place,
        r#"
        cd ../base; $JAILFS apply --undo; [ "$(cat d/f e/f | tr '\n' ' ')" = 'old old ' ]
        $JAILFS apply; [ "$(cat d/f e/f | tr '\n' ' ')" = 'old mine ' ]
        "#,
    );
    assert_eq!(said.code, 0, "{}\n{}", said.out, said.err);
}
