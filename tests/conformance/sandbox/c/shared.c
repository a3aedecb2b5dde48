/* Uses System V memory, or a semaphore without or with SEM_UNDO, and waits. */
#include <fcntl.h>
#include <string.h>
#include <sys/ipc.h>
#include <sys/sem.h>
#include <sys/shm.h>
#include <unistd.h>

int main(int count, char **words)
{
	const char *what = words[count - 1];

	if (!strcmp(what, "memory")) {
		char *memory = shmat(shmget(IPC_PRIVATE, 4096, IPC_CREAT | 0600), NULL, 0);
		memory[0] = 1;
	} else {
		struct sembuf more = { 0, 1, strcmp(what, "undo") ? 0 : SEM_UNDO };
		semop(semget(IPC_PRIVATE, 1, IPC_CREAT | 0600), &more, 1);
	}
	close(open("/workspace/ready", O_CREAT | O_WRONLY, 0600));
	for (;;)
		pause();
}
