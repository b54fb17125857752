# Prints everything visible in a tree, one line for each node, sorted. With "quietly", no access
# time changes; the access times of links, which cannot be read without a change, are then left out.
import os, stat, sys, zlib

root, quietly = os.fsencode(sys.argv[1]), sys.argv[2] == "quietly"
flags = os.O_NOATIME if quietly else 0
lines, by_ino = [], {}


def look(path, shown):
    s = os.lstat(path)
    by_ino.setdefault(s.st_ino, []).append(shown)
    extra = [
        f"{name}={os.getxattr(path, name, follow_symlinks=False)!r}"
        for name in sorted(os.listxattr(path, follow_symlinks=False))
    ]
    names, size, atime = [], s.st_size, s.st_atime_ns
    if stat.S_ISDIR(s.st_mode):
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | flags)
        with os.scandir(fd) as listed:
            names = sorted((os.fsencode(entry.name), entry.inode()) for entry in listed)
        os.close(fd)
    elif stat.S_ISREG(s.st_mode):
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | flags)
        with os.fdopen(fd, "rb") as file:
            data = file.read(60)
            crc = zlib.crc32(data)
            while piece := file.read(1 << 20):
                crc = zlib.crc32(piece, crc)
        extra.append(repr(data) if len(data) < 60 else f"crc32 {crc:08x}")
    elif stat.S_ISLNK(s.st_mode):
        extra.append(repr(os.readlink(path)))
        atime = 0 if quietly else atime
    lines.append(
        (
            shown,
            f"{shown!r} {s.st_mode:o} uid={s.st_uid} gid={s.st_gid} nlink={s.st_nlink} "
            f"ino={s.st_ino} rdev={s.st_rdev} size={size} mtime={s.st_mtime_ns} "
            f"ctime={s.st_ctime_ns} atime={atime} {extra}",
        )
    )
    for name, ino in names:
        below = os.path.join(shown, name)
        look(os.path.join(path, name), below)
        real = os.lstat(os.path.join(path, name)).st_ino
        if real != ino:
            lines.append((below, f"{below!r} is listed as {ino}"))


look(root, b".")
for shown, line in sorted(lines):
    print(line)
for names in sorted(by_ino.values()):
    if len(names) > 1:
        print("one file:", sorted(names))
