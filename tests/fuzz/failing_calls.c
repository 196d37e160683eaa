/* Preloaded into a process, makes one of its calls fail: the N-th on files below a folder, or the N-th for much memory.

   What SQLite tests in this way is said at https://sqlite.org/testing.html, "Out-Of-Memory Testing" and "I/O Error Testing".
   glibc's own allocator is called by the names under which it offers it, since looking names up allocates. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum { OFF, FILES, MEMORY };
enum { ONCE, FULL, SHORT }; /* FULL: the disk stays full. SHORT: half of what is written is, and nothing fails. */

static atomic_int watched = OFF;
static atomic_long count, failed;
static long fail_at;
static int error_number, manner;
static size_t least_bytes;
static char prefix[PATH_MAX], what_failed[PATH_MAX + 64];
static _Thread_local int inside;

void failing_calls_arm(int what, const char *folder, size_t bytes, long at, int error, int how) {
  snprintf(prefix, sizeof prefix, "%s", folder);
  least_bytes = bytes;
  fail_at = at;
  error_number = error;
  manner = how;
  count = failed = 0;
  what_failed[0] = 0;
  watched = what;
}

long failing_calls_count(void) { return count; }
long failing_calls_failed(void) { return failed; }
const char *failing_calls_what(void) { return what_failed; }

static int is_due(const char *name, const char *path, int fills) {
  long now = ++count;
  int due = now == fail_at || (manner == FULL && fills && failed && now > fail_at);
  if (due && manner == FULL && !fills) return 0;
  if (due && !failed++) snprintf(what_failed, sizeof what_failed, "%s %s", name, path);
  return due;
}

static int is_below(int folder, const char *path, char *whole) {
  if (path[0] == '/' || folder == AT_FDCWD) {
    snprintf(whole, PATH_MAX, "%s", path);
  } else {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
    ssize_t size = readlink(link, whole, PATH_MAX - 1);
    if (size < 0) return 0;
    snprintf(whole + size, PATH_MAX - size, path[0] ? "/%s" : "%s", path);
  }
  return strncmp(whole, prefix, strlen(prefix)) == 0;
}

/* Whether a call on a path fails now. `fills`: whether it fails on a full disk. */
static int path_fails(const char *name, int folder, const char *path, int fills) {
  char whole[PATH_MAX];
  if (watched != FILES || manner == SHORT || !is_below(folder, path, whole) || !is_due(name, whole, fills)) return 0;
  errno = error_number;
  return 1;
}

static int file_fails(const char *name, int file, int fills) { return path_fails(name, file, "", fills); }

/* Whether half of a write is to be made. */
static int is_short(const char *name, int file, size_t size) {
  char whole[PATH_MAX];
  return watched == FILES && manner == SHORT && size > 1 && is_below(file, "", whole) && is_due(name, whole, 1);
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

#define WRITES(name, parameters, arguments, half)                    \
  ssize_t name parameters {                                          \
    if (file_fails(#name, file, 1)) return -1;                       \
    if (is_short(#name, file, size)) return REAL(name) half;         \
    return REAL(name) arguments;                                     \
  }
WRITES(write, (int file, const void *data, size_t size), (file, data, size), (file, data, size / 2))
WRITES(pwrite, (int file, const void *data, size_t size, off_t at), (file, data, size, at), (file, data, size / 2, at))
WRITES(pwrite64, (int file, const void *data, size_t size, off64_t at), (file, data, size, at), (file, data, size / 2, at))

ssize_t writev(int file, const struct iovec *parts, int size) {
  return file_fails("writev", file, 1) ? -1 : REAL(writev)(file, parts, size);
}

#define OF_FILE(name, fills, parameters, arguments) \
  int name parameters { return file_fails(#name, file, fills) ? -1 : REAL(name) arguments; }
OF_FILE(fsync, 0, (int file), (file))
OF_FILE(fdatasync, 0, (int file), (file))
OF_FILE(ftruncate, 1, (int file, off_t size), (file, size))
OF_FILE(ftruncate64, 1, (int file, off64_t size), (file, size))

/* A file system over a network says only now that what was written did not fit. The descriptor is gone all the same. */
int close(int file) {
  int flags = watched == FILES ? fcntl(file, F_GETFL) : -1;
  int fails = flags >= 0 && (flags & O_ACCMODE) != O_RDONLY && file_fails("close", file, 0);
  int error = errno, done = REAL(close)(file);
  if (fails) errno = error;
  return fails ? -1 : done;
}

#define OF_PATH(name, fills, folder, path, parameters, arguments) \
  int name parameters { return path_fails(#name, folder, path, fills) ? -1 : REAL(name) arguments; }
OF_PATH(rename, 0, AT_FDCWD, new, (const char *old, const char *new), (old, new))
OF_PATH(renameat, 0, b, new, (int a, const char *old, int b, const char *new), (a, old, b, new))
OF_PATH(link, 1, AT_FDCWD, new, (const char *old, const char *new), (old, new))
OF_PATH(mkdir, 1, AT_FDCWD, path, (const char *path, mode_t mode), (path, mode))
OF_PATH(mkdirat, 1, folder, path, (int folder, const char *path, mode_t mode), (folder, path, mode))
OF_PATH(unlink, 0, AT_FDCWD, path, (const char *path), (path))
OF_PATH(unlinkat, 0, folder, path, (int folder, const char *path, int flags), (folder, path, flags))
OF_PATH(rmdir, 0, AT_FDCWD, path, (const char *path), (path))

#define OPENS(name, folder, parameters, arguments)                                                              \
  int name parameters {                                                                                         \
    mode_t mode = 0;                                                                                            \
    if (flags & (O_CREAT | O_TMPFILE)) {                                                                        \
      va_list rest;                                                                                             \
      va_start(rest, flags);                                                                                    \
      mode = va_arg(rest, mode_t);                                                                              \
      va_end(rest);                                                                                             \
    }                                                                                                           \
    int writes = (flags & O_ACCMODE) != O_RDONLY || (flags & O_CREAT);                                          \
    return writes && path_fails(#name, folder, path, 1) ? -1 : REAL(name) arguments;                            \
  }
OPENS(open, AT_FDCWD, (const char *path, int flags, ...), (path, flags, mode))
OPENS(open64, AT_FDCWD, (const char *path, int flags, ...), (path, flags, mode))
OPENS(openat, at, (int at, const char *path, int flags, ...), (at, path, flags, mode))
OPENS(openat64, at, (int at, const char *path, int flags, ...), (at, path, flags, mode))

extern void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t), *__libc_memalign(size_t, size_t);

static int memory_fails(const char *name, size_t bytes) {
  if (watched != MEMORY || bytes < least_bytes || inside) return 0;
  inside = 1;
  char size[32];
  snprintf(size, sizeof size, "%zu", bytes);
  int fails = is_due(name, size, 1);
  inside = 0;
  if (fails) errno = ENOMEM;
  return fails;
}

void *malloc(size_t size) { return memory_fails("malloc", size) ? NULL : __libc_malloc(size); }
void *calloc(size_t many, size_t size) { return memory_fails("calloc", many * size) ? NULL : __libc_calloc(many, size); }
void *realloc(void *old, size_t size) { return memory_fails("realloc", size) ? NULL : __libc_realloc(old, size); }
void *memalign(size_t unit, size_t size) { return memory_fails("memalign", size) ? NULL : __libc_memalign(unit, size); }
void *aligned_alloc(size_t unit, size_t size) { return memalign(unit, size); }
int posix_memalign(void **place, size_t unit, size_t size) {
  if (memory_fails("posix_memalign", size) || !(*place = __libc_memalign(unit, size))) return ENOMEM;
  return 0;
}
