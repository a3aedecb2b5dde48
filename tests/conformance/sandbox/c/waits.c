/* Says that it is there, and waits. */
#include <fcntl.h>
#include <unistd.h>

int main(void)
{
	open("/workspace/ready", O_CREAT | O_WRONLY, 0600);
	for (;;)
		pause();
}
