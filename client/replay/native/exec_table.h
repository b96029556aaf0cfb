/* The executable table of one graph: finds the executable that is bound to the addresses of a call, or writes them into one.
 *
 * Part of `helper.c`. `client/replay/exec_cache.py` gives the reasons of its rules. */

#define MOST_EXECUTABLES 64
#define MOST_SEEN 256

typedef struct {
    uint64_t index, offset; /* of a tensor in its list, and bytes from where its segment begins, modulo 2**64 */
} Member;

typedef struct {
    uint64_t members, recorded, alignment, words, nodes; /* how many members, words and nodes; where it was recorded, and how it must be aligned */
} Segment;

typedef struct {
    uint64_t index, offset; /* of a word that follows a segment, and bytes from where that begins, modulo 2**64 */
} Word;

typedef struct {
    uint64_t function, node, parameters, context; /* how a node is written, by a function of the driver's; a kernel has no context */
} Write;

typedef struct {
    uint64_t handle, hash, used, *at; /* `hash` is the hash of its addresses, 0 if they are not known; `used` is the latest call */
    Py_ssize_t next;                  /* that was used after it the last time */
} Executable;

typedef struct {
    Py_buffer numbers, parameters; /* the array that the next five fields point into; all node parameters */
    const Member *members;         /* those of inputs come first, then those of memories */
    const Segment *segments;
    const Word *words;
    const uint64_t *nodes;
    const Write *writes;
    Py_ssize_t inputs, count, segment_count, node_count; /* `count` members */
    Py_ssize_t worth, idle;
    Executable all[MOST_EXECUTABLES];
    Py_ssize_t made, limit, latest, written;
    int unprofiled; /* whether none may be launched while a profiler runs */
    uint64_t calls, seen[MOST_SEEN], seen_count;
    uint64_t *now, *words_at; /* addresses of the members in this call, and those that the words hold */
    uint8_t *dirty;           /* nodes that are to be written */
    PyObject *make, *fail;
} Table;

#define TABLE "pygraph.table"

static void release_table(Table *table) {
    for (Py_ssize_t i = 0; i < table->made; i++) PyMem_Free(table->all[i].at);
    PyBuffer_Release(&table->numbers); /* does nothing to one that was not had */
    PyBuffer_Release(&table->parameters);
    PyMem_Free(table->now);
    PyMem_Free(table->words_at);
    PyMem_Free(table->dirty);
    Py_XDECREF(table->make);
    Py_XDECREF(table->fail);
    PyMem_Free(table);
}

static void free_table(PyObject *capsule) { release_table(PyCapsule_GetPointer(capsule, TABLE)); }

/* Returns whether all indices in the numbers are within bounds. */
static int is_sound(const Table *table) {
    uint64_t members = 0, words = 0, nodes = 0, all_words = table->parameters.len / sizeof(uint64_t);
    for (Py_ssize_t i = 0; i < table->segment_count; i++) {
        const Segment *segment = &table->segments[i];
        if (segment->members == 0 || segment->members > (uint64_t)table->count || segment->alignment == 0 || members + segment->members > (uint64_t)table->count) return 0;
        members += segment->members, words += segment->words, nodes += segment->nodes;
    }
    for (const Word *word = table->words; word < (const Word *)table->nodes; word++, words--)
        if (word->index >= all_words || words == 0) return 0;
    for (const uint64_t *node = table->nodes; node < (const uint64_t *)table->writes; node++, nodes--)
        if (*node >= (uint64_t)table->node_count || nodes == 0) return 0;
    for (Py_ssize_t i = 0; i < table->count; i++)
        if (table->members[i].index > PY_SSIZE_T_MAX / 8) return 0;
    return members == (uint64_t)table->count && words == 0 && nodes == 0;
}

/* Points the table's arrays into the numbers: six counts, then the items of each, then the recorded addresses. */
static int lay_out(Table *table) {
    enum { INPUTS, MEMBERS, SEGMENTS, WORDS, NODES, WRITES, COUNTS };
    const uint64_t *numbers = table->numbers.buf, *end = numbers + table->numbers.len / sizeof(uint64_t);
    if (end - numbers < COUNTS) return 0;
    for (int i = 0; i < COUNTS; i++)
        if (numbers[i] > (1u << 30)) return 0;
    table->inputs = numbers[INPUTS], table->count = numbers[MEMBERS], table->segment_count = numbers[SEGMENTS], table->node_count = numbers[WRITES];
    table->members = (const Member *)(numbers + COUNTS);
    table->segments = (const Segment *)(table->members + numbers[MEMBERS]);
    table->words = (const Word *)(table->segments + numbers[SEGMENTS]);
    table->nodes = (const uint64_t *)(table->words + numbers[WORDS]);
    table->writes = (const Write *)(table->nodes + numbers[NODES]);
    return (const uint64_t *)(table->writes + numbers[WRITES]) + numbers[MEMBERS] == end && table->inputs <= table->count;
}

/* Returns the addresses of the members at which the graph was recorded. */
static const uint64_t *recorded(const Table *table) { return (const uint64_t *)(table->writes + table->node_count); }

/* Adds an executable that is bound to these addresses; returns NULL with an exception set. */
static Executable *add(Table *table, uint64_t handle, uint64_t hash, const uint64_t *at) {
    Executable *added = &table->all[table->made];
    *added = (Executable){handle, hash, table->calls, PyMem_Malloc((table->count + 1) * sizeof(uint64_t)), table->made};
    if (added->at == NULL) return (Executable *)PyErr_NoMemory();
    memcpy(added->at, at, table->count * sizeof(uint64_t));
    table->made++;
    return added;
}

static int begin_table(Table *table, PyObject *numbers, PyObject *parameters, unsigned long long handle) {
    if (PyObject_GetBuffer(numbers, &table->numbers, PyBUF_SIMPLE) < 0) return -1;
    if (PyObject_GetBuffer(parameters, &table->parameters, PyBUF_WRITABLE) < 0) return -1;
    if (!lay_out(table) || !is_sound(table) || table->limit < 1 || table->limit > MOST_EXECUTABLES) {
        PyErr_SetString(PyExc_ValueError, "a table's numbers do not agree");
        return -1;
    }
    size_t size = (table->count + 1) * sizeof(uint64_t);
    table->now = PyMem_Malloc(size), table->words_at = PyMem_Malloc(size), table->dirty = PyMem_Malloc(table->node_count + 1);
    if (table->now == NULL || table->words_at == NULL || table->dirty == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    memcpy(table->words_at, recorded(table), table->count * sizeof(uint64_t));
    return handle != 0 && add(table, handle, 0, recorded(table)) == NULL ? -1 : 0;
}

static PyObject *table(PyObject *module, PyObject *args) {
    PyObject *numbers, *parameters, *make, *fail;
    unsigned long long handle;
    Table *made = PyMem_Calloc(1, sizeof(Table));
    if (made == NULL) return PyErr_NoMemory();
    int parsed = PyArg_ParseTuple(args, "OOKnnnOO", &numbers, &parameters, &handle, &made->limit, &made->worth, &made->idle, &make, &fail);
    if (parsed) made->make = Py_NewRef(make), made->fail = Py_NewRef(fail);
    PyObject *capsule = parsed && begin_table(made, numbers, parameters, handle) == 0 ? PyCapsule_New(made, TABLE, free_table) : NULL;
    if (capsule == NULL) release_table(made);
    return capsule;
}

/* Prefetches objects, tensors and storages, each as soon as the pointer to it is there: after a step of a program none of them is in the
 * near caches, and waiting for one cache line after the other is slow. A wrong address does no harm, as a prefetch reads nothing: so a torch
 * with other field offsets does no harm either. */
#define AHEAD 6
#define STORAGE 16 /* bytes into a tensor: the pointer to its storage */
#define OFFSET 144 /* its offset, number of elements and dtype */
#define KEYS 176

static char *tensor_ahead(PyObject *object) { return is_tensor(object) ? *(char **)((char *)object + torch.offset) : NULL; }

static void fetch(PyObject *const *objects, const Member *members, Py_ssize_t count, Py_ssize_t i) {
    Py_ssize_t object = i + 3 * AHEAD, tensor = i + 2 * AHEAD, storage = i + AHEAD;
    char *found;
    if (object < count) __builtin_prefetch(objects[members[object].index]);
    if (tensor >= 0 && tensor < count && (found = tensor_ahead(objects[members[tensor].index])) != NULL) {
        __builtin_prefetch(found + STORAGE);
        __builtin_prefetch(found + OFFSET);
        __builtin_prefetch(found + KEYS);
    }
    if (storage >= 0 && storage < count && (found = tensor_ahead(objects[members[storage].index])) != NULL) {
        char *address = *(char **)(found + STORAGE);
        __builtin_prefetch(address);
        __builtin_prefetch(address + 64);
    }
}

/* Reads the addresses of some tensors of `size` objects; returns 0, without an exception, if one is missing. */
static int read_addresses(PyObject *const *objects, Py_ssize_t size, const Member *members, Py_ssize_t count, uint64_t *now) {
    for (Py_ssize_t i = 0; i < count; i++)
        if (members[i].index >= (uint64_t)size) return 0;
    for (Py_ssize_t i = count > AHEAD ? -3 * AHEAD : 0; i < count; i++) {
        if (count > AHEAD) fetch(objects, members, count, i);
        if (i < 0) continue;
        void *found, *tensor = tensor_of(objects[members[i].index]);
        if (tensor == NULL || torch.get_data_ptr(tensor, &found) != 0) {
            PyErr_Clear();
            return 0;
        }
        now[i] = (uint64_t)(uintptr_t)found;
    }
    return 1;
}

static int read_inputs(Table *table, PyObject *inputs) {
    return read_addresses(((PyListObject *)inputs)->ob_item, PyList_GET_SIZE(inputs), table->members, table->inputs, table->now);
}

static int read_memory(Table *table, PyObject *const *memory, Py_ssize_t size) {
    return read_addresses(memory, size, table->members + table->inputs, table->count - table->inputs, table->now + table->inputs);
}

static int is_bound(const Table *table, const Executable *executable) {
    return memcmp(executable->at, table->now, table->count * sizeof(uint64_t)) == 0;
}

static uint64_t hash_of(const Table *table) {
    uint64_t hash = 0;
    for (Py_ssize_t i = 0; i < table->count; i++) {
        hash = (hash ^ table->now[i]) * 0x9E3779B97F4A7C15u;
        hash ^= hash >> 32;
    }
    return hash | 1;
}

static Executable *find(Table *table, uint64_t hash) {
    for (Executable *each = table->all; each < table->all + table->made; each++)
        if (each->hash == hash && is_bound(table, each)) return each;
    return NULL;
}

/* Returns whether this was called with the same hash lately, and remembers the hash. */
static int was_seen(Table *table, uint64_t hash) {
    for (int i = 0; i < MOST_SEEN; i++)
        if (table->seen[i] == hash) return 1;
    table->seen[table->seen_count++ % MOST_SEEN] = hash;
    return 0;
}

/* Returns whether the members of a segment have their distances from each other, and are aligned. */
static int fits(const Table *table, const Segment *segment, Py_ssize_t first) {
    uint64_t base = table->now[first] - table->members[first].offset;
    for (uint64_t i = 1; i < segment->members; i++)
        if (table->now[first + i] - table->members[first + i].offset != base) return 0;
    return (base - segment->recorded) % segment->alignment == 0;
}

/* Marks the nodes that use a segment whose address is not that in `at`; returns their number, or -1 if the call does not fit. */
static Py_ssize_t to_be_written(Table *table, const uint64_t *at) {
    Py_ssize_t first = 0, count = 0;
    const uint64_t *node = table->nodes;
    memset(table->dirty, 0, table->node_count);
    for (const Segment *segment = table->segments; segment < table->segments + table->segment_count; first += segment->members, node += segment->nodes, segment++) {
        if (memcmp(at + first, table->now + first, segment->members * sizeof(uint64_t)) == 0) continue;
        if (!fits(table, segment, first)) return -1;
        for (uint64_t i = 0; i < segment->nodes; i++) {
            count += !table->dirty[node[i]];
            table->dirty[node[i]] = 1;
        }
    }
    return count;
}

/* Writes the addresses of the call into the node parameters. */
static void follow(Table *table) {
    Py_ssize_t first = 0;
    const Word *word = table->words;
    for (const Segment *segment = table->segments; segment < table->segments + table->segment_count; first += segment->members, word += segment->words, segment++) {
        if (memcmp(table->words_at + first, table->now + first, segment->members * sizeof(uint64_t)) == 0) continue;
        uint64_t base = table->now[first] - table->members[first].offset;
        for (uint64_t i = 0; i < segment->words; i++) ((uint64_t *)table->parameters.buf)[word[i].index] = base + word[i].offset;
    }
    memcpy(table->words_at, table->now, table->count * sizeof(uint64_t));
}

static int write_node(const Write *write, void *executable) {
    void *node = (void *)write->node, *parameters = (void *)write->parameters;
    if (write->context == 0) return ((int (*)(void *, void *, void *))write->function)(executable, node, parameters);
    return ((int (*)(void *, void *, void *, void *))write->function)(executable, node, parameters, (void *)write->context);
}

/* Has `make` instantiate the graph with the words as they are. `replaced`: the executable whose place the new one takes; 0: it is one more.
 * Returns 0 if there is none: with an exception, or without one if `make` has returned None. After None for one more, the table
 * asks for no more of these. */
static uint64_t instantiate(Table *table, uint64_t replaced, void *stream) {
    PyObject *made = PyObject_CallFunction(table->make, "KK", (unsigned long long)(uintptr_t)stream, (unsigned long long)replaced);
    uint64_t handle = made == NULL || made == Py_None ? 0 : PyLong_AsUnsignedLongLong(made);
    if (made == Py_None && replaced == 0) table->limit = table->made;
    Py_XDECREF(made);
    return PyErr_Occurred() ? 0 : handle;
}

/* Writes the marked nodes; returns 0, or -1 with an exception set: the addresses of the executable are unknown then. The driver refuses a copy
 * between memory that is mapped otherwise than when the executable was made. Then another one takes its place. */
static int write_noted(Table *table, Executable *executable, uint64_t hash, void *stream) {
    Py_ssize_t node;
    int code = 0;
    follow(table);
    Py_BEGIN_ALLOW_THREADS /* as in `launched_by` */
    for (node = 0; node < table->node_count; node++)
        if (table->dirty[node] && (code = write_node(&table->writes[node], (void *)executable->handle)) != 0) break;
    Py_END_ALLOW_THREADS
    uint64_t other = code != 0 && table->writes[node].context != 0 ? instantiate(table, executable->handle, stream) : 0;
    if (other != 0) executable->handle = other;
    if (code == 0 || other != 0) {
        memcpy(executable->at, table->now, table->count * sizeof(uint64_t));
        executable->hash = hash;
        return 0;
    }
    memset(executable->at, 0xFF, table->count * sizeof(uint64_t));
    executable->hash = 0;
    if (PyErr_Occurred()) return -1;
    PyObject *none = PyObject_CallFunction(table->fail, "in", code, node);
    if (none != NULL) PyErr_SetString(PyExc_RuntimeError, "a node could not be written");
    Py_XDECREF(none);
    return -1;
}

/* Returns a new executable, added as bound to the addresses `at`; NULL with an exception set, or without one if none can be made. */
static Executable *another_executable(Table *table, uint64_t hash, const uint64_t *at, void *stream) {
    follow(table);
    uint64_t handle = instantiate(table, 0, stream);
    return handle == 0 ? NULL : add(table, handle, hash, at);
}

/* Returns the least recently used executable if its last use is long ago, else the first. */
static Executable *idle_or_first(Table *table) {
    Executable *oldest = table->all;
    for (Executable *each = table->all + 1; each < table->all + table->made; each++)
        if (oldest == table->all || each->used < oldest->used) oldest = each;
    return table->calls - oldest->used > (uint64_t)table->idle ? oldest : table->all;
}

/* Binds an executable to the call's addresses and returns it; NULL with an exception set, or without one if the call does not fit. */
static Executable *rebound_executable(Table *table, uint64_t hash, void *stream) {
    Executable *to = table->all;
    table->written = to_be_written(table, to->at);
    if (table->written < 0) return NULL;
    if (was_seen(table, hash) && table->written >= table->worth) {
        Executable *made = table->made < table->limit ? another_executable(table, hash, table->now, stream) : NULL;
        if (made != NULL || PyErr_Occurred()) return made;
        to = idle_or_first(table);
        table->written = to_be_written(table, to->at);
    }
    return write_noted(table, to, hash, stream) == 0 ? to : NULL;
}

/* Returns an executable bound to the call's addresses; NULL as `rebound_executable` does. */
static Executable *bound_executable(Table *table, void *stream) {
    /* Its kernels are written as if it were bound to where it was recorded. */
    if (table->made == 0 && (to_be_written(table, recorded(table)) < 0 || another_executable(table, 0, recorded(table), stream) == NULL)) return NULL;
    Executable *latest = &table->all[table->latest], *found = &table->all[latest->next];
    table->written = 0;
    table->calls++;
    if (!is_bound(table, found)) {
        uint64_t hash = hash_of(table);
        found = find(table, hash);
        if (found == NULL) found = rebound_executable(table, hash, stream);
        if (found == NULL) return NULL;
    }
    latest->next = table->latest = found - table->all;
    found->used = table->calls;
    return found;
}

/* CUDA_KERNEL_NODE_PARAMS_v2 */
typedef struct {
    void *function;
    unsigned grid[3], block[3], shared;
    void **arguments, **extra;
    void *kernel, *context;
} KernelParameters;

/* What stands for an executable where a graph is one kernel; see `client/replay/single_kernel.py`. */
typedef struct {
    int (*launch)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **); /* cuLaunchKernel */
    const KernelParameters *parameters;
} Kernel;

static int launch_kernel(void *kernel, void *stream) {
    const KernelParameters *p = ((const Kernel *)kernel)->parameters;
    void *function = p->function != NULL ? p->function : p->kernel;
    return ((const Kernel *)kernel)->launch(function, p->grid[0], p->grid[1], p->grid[2], p->block[0], p->block[1], p->block[2], p->shared, stream, p->arguments, p->extra);
}

/* Stands for the driver's function that writes a node: the launch reads the words themselves. */
static int write_nothing(void *kernel, void *node, void *parameters) { return 0; }

/* keep_from_profiles(table) */
static PyObject *keep_from_profiles(PyObject *module, PyObject *capsule) {
    Table *table = PyCapsule_GetPointer(capsule, TABLE);
    if (table == NULL) return NULL;
    table->unprofiled = 1;
    Py_RETURN_NONE;
}

/* kernel_functions() */
static PyObject *kernel_functions(PyObject *module, PyObject *none) {
    return Py_BuildValue("KK", (unsigned long long)(uintptr_t)launch_kernel, (unsigned long long)(uintptr_t)write_nothing);
}

/* bind(table, inputs, memory, stream) */
static PyObject *bind(PyObject *module, PyObject *const *args, Py_ssize_t given) {
    if (given != 4 || !PyList_Check(args[1]) || !PyList_Check(args[2])) {
        PyErr_SetString(PyExc_TypeError, "a table, two lists and a stream are wanted");
        return NULL;
    }
    Table *table = PyCapsule_GetPointer(args[0], TABLE);
    if (table == NULL) return NULL;
    if (!read_inputs(table, args[1]) || !read_memory(table, ((PyListObject *)args[2])->ob_item, PyList_GET_SIZE(args[2]))) Py_RETURN_NONE;
    void *stream = PyLong_AsVoidPtr(args[3]);
    Executable *found = PyErr_Occurred() ? NULL : bound_executable(table, stream);
    if (found == NULL) return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
    return Py_BuildValue("Kn", (unsigned long long)found->handle, table->written);
}
