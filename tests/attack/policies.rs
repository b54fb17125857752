//! `-o links=` and `-o allow-target=`: the results of readlink(2) and of following, and the effect
//! on git.

use std::fs;
use std::os::unix::fs::symlink;
use std::process::Command;
use std::time::Duration;

use crate::place::{PATH, Place};

fn place() -> Place {
    let place = Place::new(Duration::from_secs(90));
    for dir in ["base/d", "mnt", "home", "out"] {
        fs::create_dir_all(place.at(dir)).unwrap();
    }
    fs::write(place.at("out/secret"), "secret").unwrap();
    symlink("the text outside", place.at("out/link")).unwrap();
    symlink("../out/secret", place.at("base/leak")).unwrap();
    symlink("../out", place.at("base/outdir")).unwrap();
    symlink("d/../d/f", place.at("base/odd")).unwrap();
    symlink("/etc/passwd", place.at("base/d/abs")).unwrap();
    fs::write(place.at("base/d/f"), "inside").unwrap();
    place
}

fn errno(result: std::io::Result<impl Sized>) -> i32 {
    result.err().expect("it fails").raw_os_error().expect("by an errno")
}

#[test]
fn readlink_returns_the_stored_text_and_following_is_refused() {
    let place = place();
    place.ok(&["mount", "base", "mnt"]);
    for (link, text) in [
        ("leak", "../out/secret"),
        ("outdir", "../out"),
        ("odd", "d/../d/f"),
        ("d/abs", "/etc/passwd"),
    ] {
        assert_eq!(fs::read_link(place.at("mnt").join(link)).unwrap().to_str(), Some(text));
    }
    for link in ["leak", "outdir", "d/abs", "outdir/secret"] {
        let path = place.at("mnt").join(link);
        assert_eq!(errno(fs::metadata(&path)), libc::EXDEV, "{link}");
        assert_eq!(errno(fs::read(&path)), libc::EXDEV, "{link}");
        assert_eq!(errno(fs::read_dir(&path)), libc::EXDEV, "{link}");
    }
    assert_eq!(fs::read_to_string(place.at("mnt/odd")).unwrap(), "inside");
    // Programs need this: tar and cp copy the links, and git finds them unchanged.
    let script = "cp -a mnt copy && tar -C mnt -cf copy.tar . && [ \"$(readlink copy/leak)\" = \
         ../out/secret ]
        [ \"$(tar -tvf copy.tar | grep -c -e '-> ../out')\" = 2 ]
        cd mnt && git init -q . && git add -A && git -c user.name=a -c user.email=b commit -qm x
        [ -z \"$(git status --porcelain)\" ] && [ \"$(git show HEAD:leak)\" = ../out/secret ]";
    shell(&place, "", script);
    place.umount();
}

/// A repository with every sort of link, and the policies as SEMANTICS describes them.
#[test]
fn every_policy_has_its_documented_effect_on_git() {
    let place = place();
    let base = place.at("base");
    let script = "ln -s .//d/f slashes; ln -s \"$PWD/d/f\" into; ln -s d/f plain; \
         find . | xargs touch -h -d yesterday
        git init -q .; git add -A
        git -c user.name=a -c user.email=b commit -qm x";
    shell(&place, "base", script);
    let into = base.join("d/f").display().to_string();
    // The policy; the READLINK text of leak, odd, slashes, into and plain; what git reports as
    // modified.
    let deny = ["", "d/f", ".//d/f", "d/f", "d/f"];
    let stored = ["../out/secret", "d/../d/f", ".//d/f", into.as_str(), "d/f"];
    let rewrite = ["", "d/f", "d/f", "d/f", "d/f"];
    let table = [
        ("deny", deny, "d/abs into leak odd outdir"),
        ("show", stored, ""),
        ("rewrite", rewrite, "d/abs into leak odd outdir slashes"),
        ("literal", stored, ""),
    ];
    for (policy, text, modified) in table {
        place.ok(&["mount", "base", "mnt", "-o", &format!("links={policy}")]);
        let names = ["leak", "odd", "slashes", "into", "plain"];
        let read = names.map(|name| {
            fs::read_link(place.at("mnt").join(name))
                .map_or(String::new(), |text| text.display().to_string())
        });
        assert_eq!(read, text.map(str::to_owned), "{policy}");
        // git does not read a link again that is clean in its index.
        assert_eq!(shell(&place, "mnt", "git status --porcelain"), "", "{policy}");
        let status = "touch -h leak odd slashes into plain outdir d/abs; \
            git status --porcelain | sed 's/ M //' | xargs echo";
        assert_eq!(shell(&place, "mnt", status).trim(), modified, "{policy}");
        let works = policy == "show" || policy == "literal";
        for command in
            ["git add -A", "tar -cf ../x.tar .", "cp -a . ../copy; rc=$?; rm -rf ../copy; exit $rc"]
        {
            let said = shell(
                &place,
                "mnt",
                &format!("if ({command}) >/dev/null 2>&1; then echo works; fi"),
            );
            assert_eq!(said.trim() == "works", works, "{policy}: {command}");
        }
        for follow in ["odd", "slashes", "into", "plain"] {
            assert_eq!(
                fs::read_to_string(place.at("mnt").join(follow)).unwrap(),
                "inside",
                "{policy}: {follow}"
            );
        }
        assert_eq!(
            fs::read_to_string(place.at("mnt/leak")).is_ok(),
            policy == "literal",
            "{policy}"
        );
        place.ok(&["-C", "mnt", "discard"]);
        place.umount();
    }
}

#[test]
fn allowed_targets_add_up_and_let_nothing_else_through() {
    let place = place();
    for dir in ["one", "two", "three", "onex"] {
        fs::create_dir(place.at(dir)).unwrap();
        fs::write(place.at(dir).join("f"), dir).unwrap();
        symlink(place.at(dir).join("f"), place.at("base").join(dir)).unwrap();
    }
    symlink(place.at("one/../three/f"), place.at("base/dots")).unwrap();
    symlink("../one/f", place.at("base/relative")).unwrap();
    let allow = |dir: &str| format!("allow-target={}", place.at(dir).display());
    place.ok(&["mount", "base", "mnt", "-o", &allow("one"), "-o", &allow("two")]);
    for dir in ["one", "two"] {
        assert_eq!(fs::read_to_string(place.at("mnt").join(dir)).unwrap(), dir);
    }
    for dir in ["three", "onex", "dots", "relative", "leak"] {
        assert_eq!(errno(fs::read(place.at("mnt").join(dir))), libc::EXDEV, "{dir}");
    }
    place.umount();
}

/// Runs a shell script; it must succeed.
fn shell(place: &Place, dir: &str, script: &str) -> String {
    let mut command = Command::new("sh");
    place.environment(command.args(["-euc", script]).current_dir(place.at(dir)));
    let output = command.output().unwrap();
    assert!(output.status.success(), "{script}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// `links=show` leaves one thing open: readlink(2) follows the links before the last component in
/// the same call. So it returns the text of a link outside, and whether it exists; never more.
#[test]
fn links_show_reveals_only_the_text_of_links_outside() {
    let place = place();
    place.ok(&["mount", "base", "mnt"]);
    let text = fs::read_link(place.at("mnt/outdir/link")).unwrap();
    assert_eq!(text.to_str(), Some("the text outside"));
    assert_eq!(errno(fs::read_link(place.at("mnt/outdir/nothing"))), libc::ENOENT);
    for how in ["mnt/outdir/link", "mnt/outdir/secret", "mnt/outdir"] {
        assert_eq!(errno(fs::metadata(place.at(how))), libc::EXDEV, "{how}");
    }
    place.umount();
    place.ok(&["mount", "base", "mnt", "-o", "links=deny"]);
    assert_eq!(errno(fs::read_link(place.at("mnt/outdir/link"))), libc::EXDEV);
    place.umount();
}

/// Requests whose caller cannot be identified get no text: an io_uring worker that resolves a link,
/// and a call in the 32-bit ABI, whose numbers mean other calls.
#[test]
fn io_uring_and_32_bit_callers_are_refused() {
    let place = place();
    place.ok(&["mount", "base", "mnt", "-o", "links=show"]);
    let attacks: &[&str] =
        if cfg!(target_arch = "x86_64") { &[IO_URING, INT_80] } else { &[IO_URING] };
    for program in attacks {
        let mut command = Command::new("/usr/bin/python3");
        command.args(["-I", "-S", "-c", program]).arg(place.at("mnt/leak")).env("PATH", PATH);
        let output = command.output().unwrap();
        let (out, err) =
            (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        // A kernel without it cannot be attacked with it.
        assert!(out.trim() == "-18 b''" || out.trim() == "none", "{out}{err}");
    }
    place.umount();
}

/// openat(2) by io_uring, in a thread of its own. Prints the result, and the bytes that were read.
const IO_URING: &str = r#"
import ctypes, mmap, os, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
params = ctypes.create_string_buffer(120)
ring = libc.syscall(425, 4, params)
if ring < 0:
    sys.exit(print("none"))
p = struct.unpack_from("<10I", params.raw, 0)
sq = struct.unpack_from("<10I", params.raw, 40)
cq = struct.unpack_from("<10I", params.raw, 80)
rings = mmap.mmap(ring, max(sq[6] + 4 * p[0], cq[5] + 16 * p[1]), flags=mmap.MAP_SHARED, offset=0)
entries = mmap.mmap(ring, 64 * p[0], flags=mmap.MAP_SHARED, offset=0x10000000)
path = ctypes.create_string_buffer(sys.argv[1].encode())
# IORING_OP_OPENAT of the path, IOSQE_ASYNC.
entry = struct.pack("<BBHiQQIIQ", 18, 16, 0, -100, 0, ctypes.addressof(path), 0, os.O_RDONLY, 7)
entries[0:len(entry)] = entry
struct.pack_into("<I", rings, sq[6], 0)
struct.pack_into("<I", rings, sq[1], 1)
assert libc.syscall(426, ring, 1, 1, 1, None, 0) == 1
result = struct.unpack_from("<Qi", rings, cq[5])[1]
print(result, os.read(result, 99) if result >= 0 else b"")
"#;

/// readlink(2) of i386 by `int 0x80`, from a 64-bit program. Prints the result, and the bytes that
/// were read.
const INT_80: &str = r#"
import ctypes, mmap, os, sys
if os.fork():
    status = os.wait()[1]
    sys.exit(print("none") if os.WIFSIGNALED(status) else 0)
low = ctypes.CDLL(None).mmap
low.restype = ctypes.c_void_p
low.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
# MAP_PRIVATE | MAP_ANONYMOUS | MAP_32BIT, readable, writable, executable.
page = low(None, 8192, 7, 0x62, -1, 0)
path = sys.argv[1].encode() + b"\0"
ctypes.memmove(page + 512, path, len(path))
# push rbx; mov eax, 85; mov ebx, path; mov ecx, buffer; mov edx, 4096; int 0x80; pop rbx; ret
number = lambda n: n.to_bytes(4, "little")
code = (b"\x53\xb8" + number(85) + b"\xbb" + number(page + 512) + b"\xb9" + number(page + 4096)
        + b"\xba" + number(4000) + b"\xcd\x80\x5b\xc3")
ctypes.memmove(page, code, len(code))
result = ctypes.CFUNCTYPE(ctypes.c_int)(page)()
print(result, ctypes.string_at(page + 4096, max(result, 0)), flush=True)
"#;
