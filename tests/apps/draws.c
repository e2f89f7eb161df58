/* Answers each HTTP request: /draw with 16 bytes of getrandom(3) as hexadecimal, anything else with
   "ok". Has drawn before it listens. */
#include <arpa/inet.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

int main(int count, char **words) {
    unsigned char drawn[16];
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(atoi(words[count - 1]))};
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    if (getrandom(drawn, sizeof drawn, 0) != sizeof drawn) return 1;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (bind(listener, (struct sockaddr *)&address, sizeof address) || listen(listener, 16)) return 2;
    for (;;) {
        char request[4096] = "", body[64] = "ok", answer[256];
        int caller = accept(listener, NULL, NULL);
        if (read(caller, request, sizeof request - 1) > 0 && strstr(request, "/draw")) {
            getrandom(drawn, sizeof drawn, 0);
            for (int i = 0; i < 16; i++) sprintf(body + 2 * i, "%02x", drawn[i]);
        }
        int size = sprintf(answer, "HTTP/1.1 200 OK\r\ncontent-length: %zu\r\n\r\n%s",
                           strlen(body), body);
        if (write(caller, answer, size) < 0) perror("write");
        close(caller);
    }
}
