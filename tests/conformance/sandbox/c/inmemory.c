/* Runs the program that it is given from a file in memory. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

extern char **environ;

int main(int count, char **words)
{
	static char buffer[65536];
	char *arguments[] = { "inmemory", NULL };
	int memory = memfd_create("program", MFD_CLOEXEC), file = open(words[count - 1], O_RDONLY);
	ssize_t size;

	while ((size = read(file, buffer, sizeof(buffer))) > 0)
		if (write(memory, buffer, size) != size)
			return 1;
	fexecve(memory, arguments, environ);
	return 1;
}
