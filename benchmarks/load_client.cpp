// Load on a server of OpenAI's API: streamed requests on kept connections, one thread, epoll. Counts, and computes nothing else, so that
// the machine belongs to the server.
//
//   c++ -O2 -std=c++20 load_client.cpp -o load_client && ./load_client HOST PORT PATH CLIENTS < bodies
//
// bodies: one JSON body a line. Each client sends the next one as soon as its answer is complete. Prints one line of JSON: seconds in all,
// processor seconds of this process, and for each request [seconds to the first event, from there to the last, tokens by the server's own
// usage, events, the longest time between two events]. A status other than 200 ends the run.

#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <iostream>
#include <string>
#include <string_view>
#include <vector>

namespace {

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

[[noreturn]] void fail(const std::string& what) {
  std::fprintf(stderr, "load_client: %s\n", what.c_str());
  std::exit(1);
}

struct Figures {
  double begun = 0, first = 0, last = 0, longest = 0;
  long tokens = 0, events = 0;
};

// One connection and the request on it.
class Client {
 public:
  Client(const sockaddr_in& address, int epoll) : address(address), epoll(epoll) { open(); }

  void send_request(const std::string& head, const std::string& body) {
    text = head + std::to_string(body.size()) + "\r\n\r\n" + body;
    figures = {.begun = now()};
    send_text();
  }

  // No further request: a server may close an idle connection, which is no failure.
  void finish() { close(fd); }

  // Take what has come. True: the answer is complete.
  bool receive() {
    static char buffer[1 << 16];
    ssize_t count = read(fd, buffer, sizeof buffer);
    if (count <= 0 && used && state == State::head && line.empty()) {  // closed before this request came, as llama.cpp's server does
      close(fd);
      open();
      send_text();
      return false;
    }
    if (count <= 0) fail("the server closed the connection: " + line.substr(0, 300));
    arrived = now();
    for (std::string_view text(buffer, count); !text.empty();) {
      if (state == State::data) {
        size_t part = std::min(left, text.size());
        body(text.substr(0, part));
        text.remove_prefix(part);
        if ((left -= part) == 0) state = State::after;
        continue;
      }
      size_t end = text.find('\n');
      line.append(text.substr(0, end));
      if (end == text.npos) return false;
      text.remove_prefix(end + 1);
      if (!line.empty() && line.back() == '\r') line.pop_back();
      bool over = control_line();
      line.clear();
      if (over) return used = true;
    }
    return false;
  }

  Figures figures;

 private:
  enum class State { head, size, data, after, trailer };

  void open() {
    used = false;
    fd = socket(AF_INET, SOCK_STREAM, 0);
    if (fd < 0 || connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof address)) fail("cannot connect");
    int one = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    epoll_event event{.events = EPOLLIN, .data = {.ptr = this}};
    epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event);
  }

  void send_text() {
    state = State::head, status_ok = false, line.clear();
    for (size_t at = 0; at < text.size();) {
      ssize_t sent = send(fd, text.data() + at, text.size() - at, MSG_NOSIGNAL);
      if (sent <= 0 && used) return;  // `receive` sees it, too
      if (sent <= 0) fail("cannot send");
      at += sent;
    }
  }

  // A line of the head, or between chunks. True: the answer is complete.
  bool control_line() {
    if (state == State::head) {
      if (line.starts_with("HTTP/")) status_ok = line.find(" 200") != line.npos;
      if (!status_ok) fail(line);
      if (line.empty()) state = State::size;
    } else if (state == State::size) {
      left = std::strtoul(line.c_str(), nullptr, 16);
      state = left ? State::data : State::trailer;
    } else if (state == State::after) {
      state = State::size;
    } else {
      return line.empty();
    }
    return false;
  }

  // Bytes of the body. An event's line may be cut anywhere, also inside a chunk.
  void body(std::string_view text) {
    while (!text.empty()) {
      size_t end = text.find('\n');
      event.append(text.substr(0, end));
      if (end == text.npos) return;
      text.remove_prefix(end + 1);
      if (event.starts_with("data: {")) event_line();
      event.clear();
    }
  }

  void event_line() {
    constexpr std::string_view kUsage = "\"completion_tokens\":";
    if (size_t at = event.find(kUsage); at != event.npos) figures.tokens = std::strtol(event.c_str() + at + kUsage.size(), nullptr, 10);
    if (event.find("\"choices\":[]") != event.npos) return;  // the usage alone
    figures.events++;
    if (figures.first == 0)
      figures.first = arrived;
    else
      figures.longest = std::max(figures.longest, arrived - figures.last);
    figures.last = arrived;
  }

  sockaddr_in address;
  int epoll, fd = -1;
  bool used = false;  // by an earlier request
  State state = State::head;
  bool status_ok = false;
  size_t left = 0;
  double arrived = 0;
  std::string text, line, event;
};

}  // namespace

int main(int argc, char** argv) {
  if (argc != 5) fail("HOST PORT PATH CLIENTS < bodies");
  sockaddr_in address{.sin_family = AF_INET, .sin_port = htons(std::atoi(argv[2])), .sin_addr = {}, .sin_zero = {}};
  if (inet_pton(AF_INET, argv[1], &address.sin_addr) != 1) fail("HOST is no address");
  std::deque<std::string> bodies;
  for (std::string body; std::getline(std::cin, body);) bodies.push_back(body);
  std::string head = std::string("POST ") + argv[3] + " HTTP/1.1\r\nHost: " + argv[1] + ":" + argv[2] +
                     "\r\nContent-Type: application/json\r\nContent-Length: ";
  int epoll = epoll_create1(0);
  std::deque<Client> clients;
  std::vector<Figures> ended;
  double begun = now();
  auto next = [&](Client& client) {
    if (bodies.empty()) return client.finish();
    client.send_request(head, bodies.front());
    bodies.pop_front();
  };
  size_t wanted = bodies.size();
  for (size_t i = 0; i < std::min<size_t>(std::atoi(argv[4]), wanted); i++) next(clients.emplace_back(address, epoll));
  while (ended.size() < wanted) {
    epoll_event events[256];
    int count = epoll_wait(epoll, events, 256, -1);
    for (int i = 0; i < count; i++) {
      Client& client = *static_cast<Client*>(events[i].data.ptr);
      if (!client.receive()) continue;
      ended.push_back(client.figures);
      next(client);
    }
  }
  double wall = now() - begun;
  rusage used;
  getrusage(RUSAGE_SELF, &used);
  double cpu = used.ru_utime.tv_sec + used.ru_stime.tv_sec + (used.ru_utime.tv_usec + used.ru_stime.tv_usec) * 1e-6;
  std::printf("{\"wall_s\":%.6f,\"cpu_s\":%.6f,\"requests\":[", wall, cpu);
  for (size_t i = 0; i < ended.size(); i++) {
    const Figures& f = ended[i];
    std::printf("%s[%.6f,%.6f,%ld,%ld,%.6f]", i ? "," : "", f.first - f.begun, f.last - f.first, f.tokens, f.events, f.longest);
  }
  std::printf("]}\n");
}
