// Linked into release wheels only (tools/release). Newer C++ headers call these; glibc 2.28 and the libstdc++ of manylinux_2_28 lack them.
#include <new>

namespace std {
__attribute__((visibility("hidden"))) void __throw_bad_array_new_length() { throw bad_array_new_length(); }
}  // namespace std

// 0: the process may have several threads, so reference counts stay atomic.
extern "C" __attribute__((visibility("hidden"))) char __libc_single_threaded;
char __libc_single_threaded = 0;
