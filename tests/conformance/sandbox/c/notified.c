/* A thread, the first or another one, is told by a timer ten times a second; each time it makes a file. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static void *wait_for_signals(void *unused)
{
	struct sigevent event = { .sigev_notify = SIGEV_THREAD_ID, .sigev_signo = SIGRTMIN + 3 };
	struct itimerspec times = { { 0, 100000000 }, { 0, 100000000 } };
	sigset_t signals;
	timer_t timer;
	int number;

	sigemptyset(&signals);
	sigaddset(&signals, SIGRTMIN + 3);
	sigprocmask(SIG_BLOCK, &signals, NULL);
	event._sigev_un._tid = syscall(SYS_gettid);
	if (timer_create(CLOCK_MONOTONIC, &event, &timer) || timer_settime(timer, 0, &times, NULL))
		return unused;
	while (sigwait(&signals, &number) == 0)
		close(open("/workspace/ready", O_CREAT | O_WRONLY, 0600));
	return unused;
}

int main(int count, char **words)
{
	pthread_t thread;

	if (!strcmp(words[count - 1], "first"))
		wait_for_signals(NULL);
	pthread_create(&thread, NULL, wait_for_signals, NULL);
	pthread_join(thread, NULL);
	return 1;
}
