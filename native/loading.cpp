// Lets go of a program file's pages while its methods are loaded. For `runtime_ref` alone: an app maps its program
// without locking, and its system drops such pages by itself when it needs memory.
#if defined(__linux__)
#include <sys/mman.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <string>
#include <thread>

namespace {

constexpr std::chrono::milliseconds kPause{2};
std::atomic<bool> watching{false};
std::thread watcher;

// Every mapping of `path` in this process.
void release(const std::string& path) {
  std::FILE* maps = std::fopen("/proc/self/maps", "r");
  if (!maps) return;
  char line[4608];
  while (std::fgets(line, sizeof(line), maps)) {
    line[std::strcspn(line, "\n")] = '\0';
    unsigned long start, end;
    const char* name = std::strchr(line, '/');
    if (!name || path != name || std::sscanf(line, "%lx-%lx", &start, &end) != 2) continue;
    madvise(reinterpret_cast<void*>(start), end - start, MADV_DONTNEED);
  }
  std::fclose(maps);
}

}  // namespace

// A delegate's weights are read from the file and packed into memory of their own; without this, all that was read
// stays beside what was packed until the delegate is done, and a head is most of a small model.
extern "C" void ring_begin_loading(const char* path) {
  watching = true;
  watcher = std::thread([file = std::string(path)] {
    while (watching) {
      release(file);
      std::this_thread::sleep_for(kPause);
    }
  });
}

extern "C" void ring_end_loading() {
  watching = false;
  watcher.join();
}
#else
extern "C" void ring_begin_loading(const char*) {}
extern "C" void ring_end_loading() {}
#endif
