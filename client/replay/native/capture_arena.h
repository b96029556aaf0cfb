/* Serves a memory pool of PyTorch's with addresses of one range, from front to back: a capture needs addresses, and no memory.
 *
 * Functions of a pluggable allocator. PyTorch calls them with a lock of its own held, so they must not wait for Python's. Only the thread
 * that captures allocates from such a pool, and one thread captures at a time. */

#define ARENA_PAGE ((uintptr_t)2 << 20)

static struct {
    uintptr_t next, end;
} arena;

static void *arena_allocate(Py_ssize_t size, int device, void *stream) {
    uintptr_t begin = arena.next, room = arena.end > begin ? arena.end - begin : 0;
    if (size <= 0 || (uintptr_t)size > room) return NULL;
    uintptr_t rounded = ((uintptr_t)size + ARENA_PAGE - 1) / ARENA_PAGE * ARENA_PAGE;
    arena.next = rounded < room ? begin + rounded : arena.end;
    return (void *)begin;
}

/* The whole range is given back by who mapped memory over it. */
static void arena_release(void *address, size_t size, int device, void *stream) {}

static PyObject *arena_range(PyObject *module, PyObject *args) {
    unsigned long long next, end;
    if (!PyArg_ParseTuple(args, "KK", &next, &end)) return NULL;
    PyObject *before = PyLong_FromUnsignedLongLong(arena.next);
    arena.next = (uintptr_t)next;
    arena.end = (uintptr_t)end;
    return before;
}

static PyObject *arena_functions(PyObject *module, PyObject *unused) {
    return Py_BuildValue("KK", (unsigned long long)(uintptr_t)arena_allocate, (unsigned long long)(uintptr_t)arena_release);
}
