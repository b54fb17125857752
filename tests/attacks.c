/* Attacks that need system calls which no shell makes; for tests/containers.sh. Each exits with 0
 * if the attack succeeded. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

/* Reads the description of the user's keyring: any process of the user can, without the filter. */
static int keys(void) { return syscall(SYS_keyctl, 6 /* KEYCTL_DESCRIBE */, -4, 0, 0) < 0; }

/* Leaves the root by a directory that was opened before chroot(2). */
static int climb(void)
{
	mkdir("/tmp/x", 0755);
	if (chroot("/tmp/x"))
		return 1;
	for (int i = 0; i < 64; i++)
		chdir("..");
	return chroot(".") || access("/above-the-root", F_OK);
}

/* Renames a file so often that the records take far more than the limit; 0 if no rename fails. */
static int renames(void)
{
	char a[251], b[251];
	memset(a, 'a', 250), memset(b, 'b', 250), a[250] = b[250] = 0;
	close(open(a, O_CREAT | O_WRONLY, 0644));
	for (int i = 0; i < 30000; i++)
		if (rename(i % 2 ? b : a, i % 2 ? a : b))
			return 1;
	return 0;
}

/* Holds as many control connections as it gets, for three seconds. */
static int hold(const char *path)
{
	struct sockaddr_un to = { .sun_family = AF_UNIX };
	strncpy(to.sun_path, path, sizeof to.sun_path - 1);
	for (int i = 0; i < 64; i++)
		connect(socket(AF_UNIX, SOCK_STREAM, 0), (struct sockaddr *)&to, sizeof to);
	sleep(3);
	return 0;
}

int main(int count, char **words)
{
	const char *what = count > 1 ? words[1] : "";
	if (!strcmp(what, "keys"))
		return keys();
	if (!strcmp(what, "climb"))
		return climb();
	if (!strcmp(what, "renames"))
		return renames();
	if (!strcmp(what, "hold") && count > 2)
		return hold(words[2]);
	return 2;
}
