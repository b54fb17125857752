//! Makes, copies and removes many small files.

use crate::Res;
use crate::material::Materials;
use crate::programs::program;
use crate::runner::Run;
use crate::workloads::Workload;

pub fn all() -> Vec<Workload> {
    vec![
        Workload::new(
            "create",
            "tree",
            "untar, cp -r and rm -rf of what is new",
            Materials::small_files,
            tree,
        )
        .mutates(),
        Workload::new(
            "create",
            "remove-base",
            "rm -rf of a tree of the base",
            Materials::small_files,
            remove,
        )
        .mutates(),
    ]
}

fn tree(run: &mut Run) -> Res<()> {
    let (root, archive, files) = (run.root(), run.materials.archive()?, run.size.archive_files);
    std::fs::create_dir(root.join("new"))?;
    run.command("untar", files, program("tar", &["-C", "new", "-xf"], &root).arg(archive))?;
    run.command("cp-r", files, &mut program("cp", &["-r", "tree", "copy"], &root))?;
    run.command("rm-rf", files, &mut program("rm", &["-rf", "new"], &root))
}

fn remove(run: &mut Run) -> Res<()> {
    let (root, files) = (run.root(), run.size.archive_files);
    run.command("rm-rf", files, &mut program("rm", &["-rf", "tree"], &root))
}
