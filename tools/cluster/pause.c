/* The first process of a pod or of a test's node: waits for its end and buries children that lost their parent. */
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

static void end(int number) {
    (void)number;
    _exit(0);
}

static void bury(int number) {
    (void)number;
    while (waitpid(-1, 0, WNOHANG) > 0) {
    }
}

int main(void) {
    signal(SIGINT, end);
    signal(SIGTERM, end);
    signal(SIGCHLD, bury);
    for (;;) pause();
}
