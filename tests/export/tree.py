# Prints what an archive carries of a tree, one line for each name, sorted: type, mode, owner, time
# of the last change, content, target, device, extended attributes, and which names are one file.
# With "seconds", times are rounded to seconds, as umoci writes them.
import hashlib, os, stat, sys

root, rounds, lines, files = os.fsencode(sys.argv[1]), "seconds" in sys.argv[2:], [], {}


def look(path, shown):
    s = os.lstat(path)
    names = sorted(os.listxattr(path, follow_symlinks=False))
    extra = [(name, os.getxattr(path, name, follow_symlinks=False)) for name in names]
    if stat.S_ISREG(s.st_mode):
        digest = hashlib.sha1()
        with open(path, "rb") as file:
            while piece := file.read(1 << 20):
                digest.update(piece)
        extra.append((s.st_size, digest.hexdigest()))
    elif stat.S_ISLNK(s.st_mode):
        extra.append(os.readlink(path))
    elif stat.S_ISBLK(s.st_mode) or stat.S_ISCHR(s.st_mode):
        extra.append((os.major(s.st_rdev), os.minor(s.st_rdev)))
    if not stat.S_ISDIR(s.st_mode) and s.st_nlink > 1:
        files.setdefault(s.st_ino, []).append(shown)
        extra.append(f"{s.st_nlink} links")
    time = (s.st_mtime_ns + 500_000_000) // 10**9 if rounds else s.st_mtime_ns
    lines.append(f"{shown!r} {s.st_mode:o} {s.st_uid}:{s.st_gid} {time} {extra}")
    if stat.S_ISDIR(s.st_mode):
        for name in os.listdir(path):
            look(os.path.join(path, name), os.path.join(shown, name))


look(root, b".")
print("\n".join(sorted(lines)))
for names in sorted(sorted(names) for names in files.values()):
    print("one file:", names)
