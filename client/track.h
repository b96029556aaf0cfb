/* A call of a small graph that lies elsewhere than the call before: an executable that is bound there is launched, or one is written.
 *
 * Part of `bulk.c`. A *track* says what follows each tensor of a graph when it moves; a *place* is one executable with its addresses,
 * words and nodes, which are those of a `Binding` (`client/binding.py`). What was written lately is remembered by a *mark*, so that
 * addresses that come again are told of. From looking at addresses to the launch no instruction of Python's runs, so that an
 * interrupt of the user's leaves nothing half done. */

#define MOST_TRACKED 64 /* tensors; nodes, too */

/* An input or a memory of a call, and what follows it. */
typedef struct {
    Py_ssize_t index;
    uint64_t base, alignment; /* where it was recorded, and to how many bytes it must be aligned as that is */
    Py_ssize_t words;         /* how many follow it */
    uint64_t nodes;           /* that these belong to, a bit each */
} Follower;

typedef struct {
    uint64_t index, offset; /* bytes from the tensor, modulo 2**64 */
} Word;

/* A set of addresses that a place was written for, by its hash. */
typedef struct {
    uint64_t mark, call; /* and the latest call that came with it; 0: none has */
    int64_t times;       /* that it has come before, one soon after the other; negative: it was told of, and is not for so many calls */
} Met;

#define MOST_MET 1024 /* a multiple of */
#define ALIKE 8       /* that any one mark may be in */

typedef struct {
    Py_ssize_t inputs, count; /* those of inputs come first */
    uint64_t calls, soon;     /* so many calls from one to the next are soon */
    int64_t often;            /* addresses are told of that have come so often, or in graphs of `many` nodes, half of which follow, once */
    int many;
    Met met[MOST_MET];
    Follower followers[MOST_TRACKED];
    Word *words;    /* of one follower after the other */
    PyObject *fail; /* called with what writing a node has returned, and its number; raises */
} Track;

#define TRACK "pygraph.track"

static void free_track(PyObject *capsule) {
    Track *track = PyCapsule_GetPointer(capsule, TRACK);
    Py_DECREF(track->fail);
    PyMem_Free(track->words);
    PyMem_Free(track);
}

static int read_follower(PyObject *told, Follower *follower) {
    unsigned long long base, alignment, nodes;
    if (!PyTuple_Check(told)) {
        PyErr_SetString(PyExc_TypeError, "a follower is a tuple");
        return -1;
    }
    if (!PyArg_ParseTuple(told, "nKKnK", &follower->index, &base, &alignment, &follower->words, &nodes)) return -1;
    follower->base = base, follower->alignment = alignment, follower->nodes = nodes;
    if (follower->index >= 0 && alignment != 0 && follower->words >= 0) return 0;
    PyErr_SetString(PyExc_ValueError, "an index or a number of words is negative, or an alignment 0");
    return -1;
}

/* Returns a copy of words, which must be as many as the followers say; NULL with an exception set. */
static Word *read_words(PyObject *told, const Track *track) {
    Py_buffer words;
    Py_ssize_t count = 0;
    for (Py_ssize_t i = 0; i < track->count; i++) count += track->followers[i].words;
    if (PyObject_GetBuffer(told, &words, PyBUF_SIMPLE) < 0) return NULL;
    Word *made = NULL;
    if (words.len != count * (Py_ssize_t)sizeof(Word)) PyErr_SetString(PyExc_ValueError, "there are not as many words as the followers have");
    else if ((made = PyMem_Malloc(words.len + 1)) == NULL) PyErr_NoMemory();
    else memcpy(made, words.buf, words.len);
    PyBuffer_Release(&words);
    return made;
}

static PyObject *track(PyObject *module, PyObject *args) {
    PyObject *followers, *words, *fail;
    Py_ssize_t inputs;
    unsigned long long soon;
    long long often;
    int many;
    if (!PyArg_ParseTuple(args, "nO!OKLiO", &inputs, &PyTuple_Type, &followers, &words, &soon, &often, &many, &fail)) return NULL;
    Py_ssize_t count = PyTuple_GET_SIZE(followers);
    if (count > MOST_TRACKED || inputs < 0 || inputs > count) return PyErr_Format(PyExc_ValueError, "%d tensors at most can be tracked", MOST_TRACKED);
    Track *made = PyMem_Calloc(1, sizeof(Track));
    if (made == NULL) return PyErr_NoMemory();
    made->inputs = inputs;
    made->count = count;
    made->soon = soon, made->often = often, made->many = many;
    int failed = 0;
    for (Py_ssize_t i = 0; !failed && i < count; i++) failed = read_follower(PyTuple_GET_ITEM(followers, i), &made->followers[i]) < 0;
    made->words = failed ? NULL : read_words(words, made);
    made->fail = Py_NewRef(fail);
    PyObject *capsule = made->words == NULL ? NULL : PyCapsule_New(made, TRACK, free_track);
    if (capsule != NULL) return capsule;
    PyMem_Free(made->words);
    PyMem_Free(made);
    Py_DECREF(fail);
    return NULL;
}

/* How a node is written into an executable, by a function of the driver's; of a kernel there is no context. */
typedef struct {
    uintptr_t call;
    void *node, *parameters, *context;
    int has_context;
} Write;

typedef struct {
    PyObject *track, *executable;
    uint64_t used; /* the latest call that it was launched for */
    Py_buffer pointers, memory, words; /* of inputs and memories, by their indices; 64 bits each */
    Py_ssize_t nodes;
    Write writes[MOST_TRACKED];
} Place;

#define PLACE "pygraph.place"

static void free_made_place(Place *place) {
    PyBuffer_Release(&place->pointers); /* does nothing to one that was not had */
    PyBuffer_Release(&place->memory);
    PyBuffer_Release(&place->words);
    Py_XDECREF(place->track);
    Py_XDECREF(place->executable);
    PyMem_Free(place);
}

static void free_place(PyObject *capsule) { free_made_place(PyCapsule_GetPointer(capsule, PLACE)); }

static int read_write(PyObject *told, Write *write) {
    unsigned long long call, node, parameters, context = 0;
    if (!PyTuple_Check(told)) {
        PyErr_SetString(PyExc_TypeError, "how a node is written is a tuple");
        return -1;
    }
    if (!PyArg_ParseTuple(told, "KKK|K", &call, &node, &parameters, &context)) return -1;
    *write = (Write){(uintptr_t)call, (void *)(uintptr_t)node, (void *)(uintptr_t)parameters, (void *)(uintptr_t)context,
                     PyTuple_GET_SIZE(told) == 4};
    return 0;
}

static int has(const Py_buffer *words, uint64_t index) { return index < (uint64_t)words->len / sizeof(uint64_t); }

/* Whether a place has all that its track speaks of. */
static int has_all(const Place *place, const Track *track) {
    const Word *word = track->words;
    for (Py_ssize_t i = 0; i < track->count; i++) {
        const Follower *follower = &track->followers[i];
        if (!has(i < track->inputs ? &place->pointers : &place->memory, follower->index)) return 0;
        if (place->nodes < MOST_TRACKED && follower->nodes >> place->nodes) return 0;
        for (const Word *end = word + follower->words; word < end; word++)
            if (!has(&place->words, word->index)) return 0;
    }
    return 1;
}

static int read_writes(PyObject *told, Place *place) {
    place->nodes = PyTuple_GET_SIZE(told);
    if (place->nodes > MOST_TRACKED) {
        PyErr_Format(PyExc_ValueError, "%d nodes at most can be tracked", MOST_TRACKED);
        return -1;
    }
    for (Py_ssize_t i = 0; i < place->nodes; i++)
        if (read_write(PyTuple_GET_ITEM(told, i), &place->writes[i]) < 0) return -1;
    return 0;
}

static int read_place(Place *place, PyObject *pointers, PyObject *memory, PyObject *words, PyObject *writes) {
    const Track *track = PyCapsule_GetPointer(place->track, TRACK);
    if (track == NULL || PyObject_GetBuffer(pointers, &place->pointers, PyBUF_WRITABLE) < 0) return -1;
    if (PyObject_GetBuffer(memory, &place->memory, PyBUF_WRITABLE) < 0) return -1;
    if (PyObject_GetBuffer(words, &place->words, PyBUF_WRITABLE) < 0 || read_writes(writes, place) < 0) return -1;
    if (has_all(place, track)) return 0;
    PyErr_SetString(PyExc_IndexError, "a track goes beyond an executable's addresses, words or nodes");
    return -1;
}

static PyObject *place(PyObject *module, PyObject *args) {
    PyObject *on, *pointers, *memory, *words, *writes, *executable;
    if (!PyArg_ParseTuple(args, "OOOOO!O", &on, &pointers, &memory, &words, &PyTuple_Type, &writes, &executable)) return NULL;
    Place *made = PyMem_Calloc(1, sizeof(Place));
    if (made == NULL) return PyErr_NoMemory();
    made->track = Py_NewRef(on);
    made->executable = Py_NewRef(executable);
    PyObject *capsule = read_place(made, pointers, memory, words, writes) < 0 ? NULL : PyCapsule_New(made, PLACE, free_place);
    if (capsule == NULL) free_made_place(made);
    return capsule;
}

/* How many calls there have been since a place was launched for one. */
static PyObject *unused(PyObject *module, PyObject *args) {
    PyObject *on, *which;
    if (!PyArg_ParseTuple(args, "OO", &on, &which)) return NULL;
    const Track *track = PyCapsule_GetPointer(on, TRACK);
    const Place *place = track == NULL ? NULL : PyCapsule_GetPointer(which, PLACE);
    return place == NULL ? NULL : PyLong_FromUnsignedLongLong(track->calls - place->used);
}

static uint64_t *address_at(const Track *track, Place *place, Py_ssize_t i) {
    Py_buffer *addresses = i < track->inputs ? &place->pointers : &place->memory;
    return (uint64_t *)addresses->buf + track->followers[i].index;
}

/* Whether a place is bound to these addresses, which are in the order of the followers. */
static int is_bound(const Track *track, Place *place, const uint64_t *now) {
    for (Py_ssize_t i = 0; i < track->count; i++)
        if (*address_at(track, place, i) != now[i]) return 0;
    return 1;
}

/* How many nodes would be written. */
static int to_be_written(const Track *track, Place *place, const uint64_t *now) {
    uint64_t nodes = 0;
    for (Py_ssize_t i = 0; i < track->count; i++)
        if (*address_at(track, place, i) != now[i]) nodes |= track->followers[i].nodes;
    return __builtin_popcountll(nodes);
}

static uint64_t mark_of(const Track *track, const uint64_t *now) {
    uint64_t mark = 0;
    for (Py_ssize_t i = 0; i < track->count; i++) {
        mark = (mark ^ now[i]) * 0x9E3779B97F4A7C15u;
        mark ^= mark >> 32;
    }
    return mark;
}

/* Returns what is known of a mark; if that is nothing, in place of the one of its like that has not come for longest. */
static Met *met(Track *track, uint64_t mark) {
    Met *first = &track->met[mark % (MOST_MET / ALIKE) * ALIKE], *oldest = first;
    for (Met *each = first; each < first + ALIKE; each++) {
        if (each->mark == mark && each->call != 0) return each;
        if (each->call < oldest->call) oldest = each;
    }
    *oldest = (Met){mark, 0, 0};
    return oldest;
}

/* Whether addresses that no place is bound to have come so often that they are to be told of: then they are not for a while. */
static int comes_often(Track *track, Place *place, const uint64_t *now) {
    Met *entry = met(track, mark_of(track, now));
    if (entry->call == 0 || track->calls - entry->call > track->soon) entry->times = 0;
    else entry->times++;
    entry->call = track->calls;
    if (entry->times < 1) return 0;
    int is_most = place->nodes >= track->many && 2 * to_be_written(track, place, now) >= place->nodes;
    if (entry->times < (is_most ? 1 : track->often)) return 0;
    entry->times = -track->often;
    return 1;
}

/* Has addresses and words follow what has moved; returns the nodes to be written, a bit each. */
static uint64_t follow(const Track *track, Place *place, const uint64_t *now) {
    uint64_t nodes = 0;
    const Word *word = track->words;
    for (Py_ssize_t i = 0; i < track->count; i++) {
        const Follower *follower = &track->followers[i];
        const Word *end = word + follower->words;
        uint64_t *address = address_at(track, place, i);
        if (*address == now[i]) {
            word = end;
            continue;
        }
        *address = now[i];
        for (; word < end; word++) ((uint64_t *)place->words.buf)[word->index] = now[i] + word->offset;
        nodes |= follower->nodes;
    }
    return nodes;
}

static int write_node(const Write *write, void *executable) {
    if (!write->has_context) return ((int (*)(void *, void *, void *))write->call)(executable, write->node, write->parameters);
    return ((int (*)(void *, void *, void *, void *))write->call)(executable, write->node, write->parameters, write->context);
}

/* Returns 0, or what the driver has, with the node's number in `*failed`. */
static int write_nodes(const Place *place, uint64_t nodes, void *executable, int *failed) {
    int code = 0;
    Py_BEGIN_ALLOW_THREADS /* as `launch_by` */
    for (; code == 0 && nodes != 0; nodes &= nodes - 1) {
        *failed = __builtin_ctzll(nodes);
        code = write_node(&place->writes[*failed], executable);
    }
    Py_END_ALLOW_THREADS
    return code;
}

/* Binds a place; returns how many nodes were written, or -1 with an exception set, after which it is bound nowhere. */
static int bind(const Track *track, Place *place, const uint64_t *now) {
    void *executable = PyLong_AsVoidPtr(place->executable);
    if (executable == NULL && PyErr_Occurred()) return -1;
    uint64_t nodes = follow(track, place, now);
    int failed = 0, code = write_nodes(place, nodes, executable, &failed);
    if (code == 0) return __builtin_popcountll(nodes);
    for (Py_ssize_t i = 0; i < track->count; i++) *address_at(track, place, i) = UINT64_MAX;
    PyObject *none = PyObject_CallFunction(track->fail, "ii", code, failed);
    if (none != NULL) PyErr_SetString(PyExc_RuntimeError, "a node could not be written");
    Py_XDECREF(none);
    return -1;
}

/* Reads where some tensors of a list are; returns whether all are tensors and aligned as they must be. No exception is set. */
static int read_places(PyObject *list, const Follower *followers, Py_ssize_t count, uint64_t *now) {
    for (Py_ssize_t i = 0; i < count; i++) {
        void *found, *tensor = followers[i].index < PyList_GET_SIZE(list) ? tensor_of(PyList_GET_ITEM(list, followers[i].index)) : NULL;
        if (tensor == NULL || torch.get_data_ptr(tensor, &found) != 0) {
            PyErr_Clear();
            return 0;
        }
        now[i] = (uint64_t)(uintptr_t)found;
        if ((now[i] - followers[i].base) % followers[i].alignment) return 0;
    }
    return 1;
}
