#!/usr/bin/env python3
"""Builds a Rust project four times side by side, in forks and in plain directories.

    python3 examples/cargo_in_forks.py PROJECT [--jailfs PATH] [--forks N] [--rounds N] [--dir DIR]

Each round builds PROJECT from its sources in N mounted forks of one sandbox, all at once, and in N
copies of it on the bare disk, all at once. The first of the two changes each round. A round prints
its times in seconds; in the forks the time ends after a checkpoint of each, on the disk after
syncfs(2). Then, in MiB:

    output    what the builds wrote into their `target` directories, in blocks of 4 KiB
    distinct  the distinct blocks of these
    store     the growth of the store on disk, after equal content was found

The packages that PROJECT needs must be in the cache of cargo: it builds with `--offline`.
"""

import argparse
import hashlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

BLOCK = 4096


def on_disk(path):
    """Bytes that the files below a path take on disk."""
    files = (os.path.join(at, name) for at, _, names in os.walk(path) for name in names)
    nodes = {(stat.st_dev, stat.st_ino): stat.st_blocks for stat in map(os.lstat, files)}
    return 512 * sum(nodes.values())


def output_blocks(trees):
    """All blocks in the `target` directories of trees, and the distinct ones. A file with several
    names counts once."""
    count, distinct, seen = 0, set(), set()
    for tree in trees:
        for at, _, names in os.walk(os.path.join(tree, "target")):
            for path in (os.path.join(at, name) for name in names):
                stat = os.lstat(path)
                if (tree, stat.st_ino) in seen or os.path.islink(path):
                    continue
                seen.add((tree, stat.st_ino))
                with open(path, "rb") as file:
                    while block := file.read(BLOCK):
                        count += 1
                        distinct.add(hashlib.blake2b(block, digest_size=16).digest())
    return count * BLOCK, len(distinct) * BLOCK


def build_all(trees):
    """Runs `cargo build` in all trees side by side."""
    environment = {key: text for key, text in os.environ.items() if key != "CARGO_TARGET_DIR"}
    command = ["cargo", "build", "--quiet", "--offline"]
    builds = [subprocess.Popen(command, cwd=tree, env=environment) for tree in trees]
    if any([build.wait() for build in builds]):
        sys.exit("a build failed")


def in_directories(project, place, count):
    """Builds in copies of the project, and returns the seconds."""
    trees = [os.path.join(place, f"copy{n}") for n in range(count)]
    for tree in trees:
        shutil.copytree(project, tree, symlinks=True)
    os.sync()
    start = time.monotonic()
    build_all(trees)
    subprocess.run(["sync", "-f", place], check=True)
    spent = time.monotonic() - start
    for tree in trees:
        shutil.rmtree(tree)
    return spent


def in_forks(jailfs, project, place, count):
    """Builds in forks, and returns the seconds and the sizes."""
    base, store = os.path.join(place, "base"), os.path.join(place, "store")
    mounts = [os.path.join(place, f"fork{n}") for n in range(count)]
    shutil.copytree(project, base, symlinks=True)
    for mount in mounts:
        os.mkdir(mount)

    def run(*words):
        done = subprocess.run([jailfs, "--store", store, *words], check=True, capture_output=True)
        return done.stdout.decode()

    run("mount", base, mounts[0])
    try:
        for n in range(1, count):
            run("fork", f"fork{n}", mounts[n])
        before = on_disk(store)
        os.sync()
        start = time.monotonic()
        build_all(mounts)
        for mount in mounts:
            subprocess.run([jailfs, "checkpoint"], cwd=mount, check=True, capture_output=True)
        spent = time.monotonic() - start
        while json.loads(run("info", "--json").splitlines()[-1])["to_do"] > 0:
            time.sleep(0.2)
        output, distinct = output_blocks(mounts)
        grown = on_disk(store) - before
    finally:
        for mount in reversed(mounts):
            subprocess.run([jailfs, "umount", mount], check=False)
    shutil.rmtree(base)
    shutil.rmtree(store)
    return spent, output, distinct, grown


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("project")
    parser.add_argument("--jailfs", default="jailfs")
    parser.add_argument("--forks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dir", help="where everything is made")
    options = parser.parse_args()
    ratios = []
    for n in range(options.rounds):
        with tempfile.TemporaryDirectory(dir=options.dir, prefix="cargo_in_forks") as place:
            copies = None if n % 2 == 0 else in_directories(options.project, place, options.forks)
            forks, output, distinct, grown = in_forks(
                options.jailfs, options.project, place, options.forks
            )
            copies = copies or in_directories(options.project, place, options.forks)
        ratios.append(forks / copies)
        mib = [f"{size / (1 << 20):.1f}" for size in (output, distinct, grown)]
        print(
            f"round {n + 1}: forks {forks:.1f} s, directories {copies:.1f} s, "
            f"ratio {forks / copies:.2f}; output {mib[0]}, distinct {mib[1]}, store {mib[2]}, "
            f"store to distinct {grown / distinct:.2f}",
            flush=True,
        )
    print(f"median ratio of times {statistics.median(ratios):.2f}; load {os.getloadavg()}")


if __name__ == "__main__":
    main()
