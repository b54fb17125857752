//! Other programs read what jailfs writes, and jailfs reads what they write.

use std::path::Path;
use std::process::{Command, Stdio};

use super::harness::{Live, assert_same, shell};
use super::{BASE, CHANGES, outside, run, tree, tree_with, unpacked};

#[test]
fn umoci_unpacks_an_image_to_the_tree_that_the_mount_shows() {
    let live = Live::new(BASE);
    live.sh(CHANGES);
    let (image, copy) = (outside(&live, "image:v1"), outside(&live, "copy:v1"));
    let said = live.jailfs(&["export", "@", "--oci", &image, "--json"]);
    let wanted = tree(&live.mnt);
    assert_same(&wanted, &tree(&unpacked(&image, &outside(&live, "one"))), "the image");
    run(&["skopeo", "copy", &format!("oci:{image}"), &format!("oci:{copy}")]);
    assert_same(&wanted, &tree(&unpacked(&copy, &outside(&live, "two"))), "the copy");
    // The same state is the same image.
    let again = live.jailfs(&["export", "@", "--oci", &outside(&live, "other:v1"), "--json"]);
    let digest = |said: &str| said.split("\"digest\":").nth(1).unwrap()[..73].to_owned();
    assert_eq!(digest(&said), digest(&again));
    let exists = live.try_jailfs(&["export", "@", "--oci", &image]);
    assert_eq!(exists.status.code(), Some(1), "a tag is not replaced");
    live.jailfs(&["export", "base", "--oci", &image, "--force"]);
    live.jailfs(&["discard"]);
    assert_same(&tree(&live.mnt), &tree(&unpacked(&image, &outside(&live, "three"))), "the base");
}

#[test]
fn an_image_that_skopeo_compresses_by_zstd_is_imported() {
    let live = Live::new(BASE);
    live.sh(CHANGES);
    let (image, copy) = (outside(&live, "image:v1"), outside(&live, "copy:v1"));
    live.jailfs(&["export", "@", "--oci", &image]);
    let (from, to) = (format!("oci:{image}"), format!("oci:{copy}"));
    run(&["skopeo", "copy", "--dest-compress-format", "zstd", &from, &to]);
    let manifest = run(&["skopeo", "inspect", "--raw", &to]);
    assert!(manifest.contains("tar+zstd"), "{manifest}");
    let wanted = tree(&live.mnt);
    live.jailfs(&["restore", "base"]);
    assert_ne!(wanted, tree(&live.mnt));
    live.jailfs(&["import", &copy]);
    assert_same(&wanted, &tree(&live.mnt), "the imported image");
}

#[test]
fn podman_stores_an_image_as_the_tree_that_the_mount_shows() {
    let live = Live::new(BASE);
    live.sh(CHANGES);
    // podman stores no time before 1970, and no time of the root. It lets files inherit the default
    // ACL of their directory.
    live.sh("touch -d @5.5 dir/file; setfacl -k dir/sub");
    let wanted = tree(&live.mnt);
    // podman takes a path for a name, which has no capitals.
    let id = std::process::id();
    let dir = tempfile::Builder::new().prefix(&format!("image-{id}")).rand_bytes(0).tempdir();
    let dir = dir.unwrap();
    let image = format!("{}/layout:v1", dir.path().display());
    live.jailfs(&["export", "@", "--oci", &image]);
    let (root, state) = (outside(&live, "root"), outside(&live, "state"));
    let podman = |words: &[&str]| {
        let store = ["podman", "--root", &root, "--runroot", &state, "--storage-driver", "vfs"];
        run(&[&store, words].concat()).trim().to_owned()
    };
    let id = podman(&["pull", "--quiet", &format!("oci:{image}")]);
    let stored = tree(Path::new(&podman(&["image", "mount", &id])));
    let names = |lines: &[String]| -> Vec<String> {
        lines.iter().filter(|line| !line.starts_with("b'.' ")).cloned().collect()
    };
    podman(&["image", "unmount", &id]);
    assert_same(&names(&wanted), &names(&stored), "the stored image");
}

/// Runs a command in a container over a directory, or an image of podman's store. crun refuses a
/// machine with both versions of control groups, so it sees the second one only.
fn podman_run(store: &[&str], what: &[&str], words: &[&str]) -> String {
    let alone = "mount -t cgroup2 none /sys/fs/cgroup && exec podman \"$@\"";
    let isolated = ["unshare", "--mount", "sh", "-c", alone, "sh"];
    let run_it = ["run", "--rm", "--cgroups=disabled", "--network=none", "--no-hosts"];
    let limits = ["--ulimit=nofile=1024:1024", "--ulimit=nproc=1024:1024"];
    run(&[&isolated, store, &run_it, &limits, what, words].concat())
}

#[test]
fn podman_runs_an_export_as_a_rootfs_and_as_an_image() {
    let live = Live::new("mkdir bin; echo base > base");
    // A shell and cat with their libraries make a system.
    live.sh("cp /bin/sh /bin/cat bin; ldd /bin/sh /bin/cat | grep -o '/[^ :]*' | sort -u | \
         grep -v bin | while read f; do mkdir -p .$(dirname $f); cp $f .$f; done; \
         mkdir etc; echo 'from the mount' > etc/said; ln -s ../base etc/link");
    let id = std::process::id();
    let dir = tempfile::Builder::new().prefix(&format!("run-{id}")).rand_bytes(0).tempdir();
    let dir = dir.unwrap();
    let image = format!("{}/layout:v1", dir.path().display());
    live.jailfs(&["export", "@", "--oci", &image]);
    let (root, state) = (outside(&live, "root"), outside(&live, "state"));
    let store = ["--root", &root, "--runroot", &state, "--storage-driver", "vfs"];
    let words = ["/bin/sh", "-c", "cat /etc/said /etc/link; echo new > /new; cat /new"];
    let rootfs = unpacked(&image, &outside(&live, "rootfs"));
    let rootfs = rootfs.display().to_string();
    let said = podman_run(&store, &["--rootfs", &rootfs], &words);
    assert_eq!(said, "from the mount\nbase\nnew\n");
    let pull = ["pull", "--quiet", &format!("oci:{image}")];
    let id = run(&[&["podman"], &store[..], &pull].concat());
    assert_eq!(podman_run(&store, &[id.trim()], &words), "from the mount\nbase\nnew\n");
    assert!(!live.mnt.join("new").exists(), "the container has changed the mount");
}

#[test]
fn layers_of_checkpoints_unpack_to_the_last_state() {
    let live = Live::new(BASE);
    live.checkpoint("first");
    live.sh(CHANGES);
    live.checkpoint("second");
    live.sh("rm -r out; ln -s dir out; echo x > dir/again; rm big; mkdir -p a/b; touch a/b/c a.b");
    let image = outside(&live, "image");
    live.jailfs(&["export", "@", "--oci", &format!("{image}:all"), "--layers"]);
    live.jailfs(&["export", "second", "--oci", &format!("{image}:two"), "--layers"]);
    let all = unpacked(&format!("{image}:all"), &outside(&live, "all"));
    assert_same(&tree(&live.mnt), &tree(&all), "all layers");
    let two = unpacked(&format!("{image}:two"), &outside(&live, "two"));
    // An import applies the layers as umoci does.
    live.jailfs(&["import", &format!("{image}:two")]);
    assert_same(&tree(&two), &tree(&live.mnt), "the import of two layers");
    live.jailfs(&["import", &format!("{image}:all")]);
    assert_same(&tree(&all), &tree(&live.mnt), "the import of all layers");
}

#[test]
fn gnu_tar_extracts_the_tree_that_the_mount_shows() {
    let live = Live::new(BASE);
    live.sh(CHANGES);
    let (file, to) = (outside(&live, "all.tar"), outside(&live, "to"));
    live.jailfs(&["export", "@", "--tar", &file]);
    std::fs::create_dir(&to).unwrap();
    run(&["tar", "-C", &to, "--xattrs", "--xattrs-include=*", "--numeric-owner", "-xpf", &file]);
    assert_same(&tree(&live.mnt), &tree(Path::new(&to)), "the archive");
    assert!(std::fs::metadata(&file).unwrap().len() < 8 << 20, "holes are not stored");
}

#[test]
fn archives_of_gnu_tar_and_images_of_umoci_import_as_they_are() {
    let live = Live::new("echo old > old; mkdir dir; echo kept > dir/kept");
    let (src, image) = (outside(&live, "src"), outside(&live, "made:v1"));
    std::fs::create_dir(&src).unwrap();
    shell(Path::new(&src), BASE);
    let before = live.snapshot();
    for (name, format) in [
        ("pax.tar", "--format=pax --sparse"),
        ("old.tar", "--format=pax --sparse --sparse-version=0.0"),
        ("mid.tar", "--format=pax --sparse --sparse-version=0.1"),
        ("pax.tar.gz", "--format=pax -z"),
    ] {
        let file = outside(&live, name);
        let tar = "tar --xattrs --xattrs-include='*' --numeric-owner";
        shell(Path::new(&src), &format!("{tar} {format} -cf {file} ."));
        live.jailfs(&["import", &file]);
        assert_same(&tree(Path::new(&src)), &tree(&live.mnt), name);
        live.jailfs(&["op", "restore", "1"]);
    }
    assert_same(&before, &live.snapshot(), "the tree after op restore");
    let bundle = outside(&live, "bundle");
    let layout = outside(&live, "made");
    run(&["umoci", "init", "--layout", &layout]);
    run(&["umoci", "new", "--image", &image]);
    run(&["umoci", "unpack", "--image", &image, &bundle]);
    let rootfs = Path::new(&bundle).join("rootfs");
    let tar = "tar -C ../../src --xattrs --xattrs-include='*' -cf - .";
    shell(&rootfs, &format!("{tar} | tar --xattrs --xattrs-include='*' -xpf -"));
    run(&["umoci", "repack", "--image", &image, &bundle]);
    shell(&rootfs, "rm -r dir gone; echo new > new; mkdir dir; ln new dir/new");
    run(&["umoci", "repack", "--image", &image, &bundle]);
    live.jailfs(&["import", &image]);
    // umoci writes whole seconds, and no entry for the root.
    let names = |root: &Path| -> Vec<String> {
        let lines = tree_with(root, "seconds").into_iter();
        lines.filter(|line| !line.starts_with("b'.' ")).collect()
    };
    assert_same(&names(&rootfs), &names(&live.mnt), "the image of umoci");
}

#[test]
fn a_patch_is_applied_by_git() {
    let base = "mkdir d; seq 40 > d/text; echo gone > gone; printf '\\0\\1' > bin; cp bin b2";
    let live = Live::new(base);
    live.sh("sed -i s/7/seven/ d/text; rm gone; printf '\\0\\2\\3' > bin; chmod +x b2; ln -s d l");
    let (patch, to) = (outside(&live, "p"), outside(&live, "to"));
    live.jailfs(&["export", "@", "--patch", &patch]);
    std::fs::create_dir(&to).unwrap();
    shell(Path::new(&to), base);
    shell(Path::new(&to), &format!("git apply {patch}"));
    shell(Path::new("/"), &format!("diff -r --no-dereference {to} {}", live.mnt.display()));
    assert_eq!(shell(Path::new(&to), "stat -c %a b2"), "755\n");
}

#[test]
fn a_full_disk_and_a_closed_pipe_leave_no_file() {
    let live = Live::new("head -c 3000000 /dev/urandom > big");
    let disk = outside(&live, "disk");
    std::fs::create_dir(&disk).unwrap();
    run(&["mount", "-t", "tmpfs", "-o", "size=1m", "none", &disk]);
    let full = live.try_jailfs(&["export", "@", "--tar", &format!("{disk}/x.tar")]);
    let left: Vec<_> = std::fs::read_dir(&disk).unwrap().collect();
    let layout = live.try_jailfs(&["export", "@", "--oci", &format!("{disk}/image")]);
    let tagged = std::fs::read_to_string(format!("{disk}/image/index.json"));
    run(&["umount", &disk]);
    for output in [full, layout] {
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.contains("No space left on device"), "{said}");
    }
    assert!(left.is_empty(), "{left:?}");
    assert!(tagged.is_ok_and(|index| !index.contains("ref.name")), "no tag names half an image");
    let mut command = Command::new(env!("CARGO_BIN_EXE_jailfs"));
    let command = command.arg("-C").arg(&live.mnt).args(["export", "@", "--tar", "-"]);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("Broken pipe"), "{said}");
}
