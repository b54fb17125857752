"""Plays a person at a terminal: person.py SCRIPT COMMAND..."""
import fcntl, os, pty, re, select, struct, sys, termios, time

PATIENCE = 10
script, command = sys.argv[1], sys.argv[2:]
child, terminal = pty.fork()
if child == 0:
    os.execvp(command[0], command)
fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
seen, new = b"", b""


def look(seconds):
    """Takes what has appeared; False at the end."""
    global seen, new
    if select.select([terminal], [], [], seconds)[0]:
        try:
            data = os.read(terminal, 1 << 16)
        except OSError:
            return False
        seen, new = seen + data, new + data
        return bool(data)
    return True


def fail(line):
    print(f"not done: {line}\nseen: {seen.decode(errors='replace')}")
    os.kill(child, 9)
    sys.exit(1)


def see(text):
    global new
    end = time.monotonic() + PATIENCE
    while True:
        # The echo of the typed input does not count as the awaited output.
        at = new.find(text)
        if at >= 0:
            new = new[at + len(text):]
            return True
        if time.monotonic() > end or not look(0.05):
            return False


for line in open(script):
    verb, _, rest = line.rstrip("\n").partition(" ")
    if verb == "type":
        front = os.tcgetpgrp(terminal)
        os.write(terminal, rest.encode() + b"\r")
        # Skip the echo: it ends with the line.
        if "$?" in rest or "echo" in rest:
            see(b"\n")
    elif verb == "keys":
        os.write(terminal, rest.encode())
    elif verb == "key":
        os.write(terminal, bytes([ord(rest[1]) & 31]))
    elif verb == "size":
        rows, columns = map(int, rest.split())
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    elif verb == "settle":
        # The input that was typed last started a job; it gets later input once the shell has given
        # it the terminal.
        end = time.monotonic() + PATIENCE
        while os.tcgetpgrp(terminal) == front and time.monotonic() < end:
            look(0.02)
        time.sleep(0.1)
    elif verb == "pause":
        # For events that cannot be observed: that a shell waits for its child, or has noticed a
        # signal.
        time.sleep(0.5)
    elif verb == "see" and not see(rest.encode()):
        fail(line)
end = time.monotonic() + PATIENCE
while look(0.05):
    if time.monotonic() > end:
        fail("the shell ends")
os.waitpid(child, 0)
