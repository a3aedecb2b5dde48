/* Makes one call that waits, and says how it ended: "NAME RESULT ERRNO MILLISECONDS HANDLED". */
#define _GNU_SOURCE
#include <errno.h>
#include <linux/futex.h>
#include <poll.h>
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/select.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static volatile sig_atomic_t handled;
static long wanted; /* milliseconds */
static const char *name;
static int ends[2];
static sem_t semaphore;
static uint32_t word;

static void note(int number)
{
	(void)number;
	handled++;
}

static long now(void)
{
	struct timespec time;
	/* a restored sandbox's own clock goes on where it stood, that of the wall does not */
	clock_gettime(strcmp(name, "sem-timedwait") ? CLOCK_MONOTONIC : CLOCK_REALTIME, &time);
	return time.tv_sec * 1000 + time.tv_nsec / 1000000;
}

static struct timespec moment(clockid_t clock, long more)
{
	struct timespec time;
	clock_gettime(clock, &time);
	time.tv_sec += more / 1000;
	time.tv_nsec += more % 1000 * 1000000;
	if (time.tv_nsec >= 1000000000) {
		time.tv_nsec -= 1000000000;
		time.tv_sec++;
	}
	return time;
}

static int call(void)
{
	struct timespec span = { wanted / 1000, wanted % 1000 * 1000000 }, left;
	struct pollfd ready = { ends[0], POLLIN, 0 };

	if (!strcmp(name, "poll"))
		return poll(&ready, 1, wanted);
	if (!strcmp(name, "poll-none"))
		return poll(NULL, 0, wanted);
	if (!strcmp(name, "nanosleep"))
		return nanosleep(&span, NULL);
	if (!strcmp(name, "nanosleep-left"))
		return nanosleep(&span, &left);
	if (!strcmp(name, "raw-nanosleep"))
		return syscall(SYS_nanosleep, &span, NULL);
	if (!strcmp(name, "usleep"))
		return usleep(wanted * 1000);
	if (!strcmp(name, "sleep"))
		return sleep(wanted / 1000);
	if (!strcmp(name, "clock-nanosleep"))
		return errno = clock_nanosleep(CLOCK_MONOTONIC, 0, &span, NULL);
	if (!strcmp(name, "clock-nanosleep-absolute")) {
		span = moment(CLOCK_MONOTONIC, wanted);
		return errno = clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &span, NULL);
	}
	if (!strcmp(name, "sem-timedwait")) {
		span = moment(CLOCK_REALTIME, wanted);
		return sem_timedwait(&semaphore, &span);
	}
	if (!strcmp(name, "futex"))
		return syscall(SYS_futex, &word, FUTEX_WAIT | FUTEX_PRIVATE_FLAG, 0, &span);
	if (!strcmp(name, "select")) {
		struct timeval time = { wanted / 1000, wanted % 1000 * 1000 };
		return select(0, NULL, NULL, NULL, &time);
	}
	return 99;
}

static void *perform(void *unused)
{
	long begin = now();
	int result = call(), number = errno;
	printf("%s %d %d %ld %d\n", name, result, number, now() - begin, (int)handled);
	fflush(stdout);
	return unused;
}

int main(int count, char **words)
{
	pthread_t thread;
	struct sigaction action = { .sa_handler = note };

	name = words[1];
	wanted = atol(words[2]);
	if (pipe(ends) || sem_init(&semaphore, 0, 0))
		return 1;
	sigaction(SIGUSR1, &action, NULL);
	if (count > 3 && !strcmp(words[3], "thread")) {
		pthread_create(&thread, NULL, perform, NULL);
		pthread_join(thread, NULL);
	} else
		perform(NULL);
	return 0;
}
