/* Serves a whole call by a recording: checks whether it can, allocates, binds, launches, and makes the outputs.
 *
 * Part of `helper.c`. The steps are those of `client/replay/replay.py`, which takes them where this returns NULL.
 * Everything that is the same at each call is computed when the recording is kept. */

#include <structmember.h>

/* The data of one recording that each call needs. */
typedef struct {
    PyObject_HEAD
    PyObject *allocate, *arguments; /* called with each of a tuple of tuples; each result goes */
    PyObject *targets;               /* to the index in `memory` that this tuple has for it, as `indices` */
    PyObject *plan;                 /* capsule */
    PyObject *blank;                /* the outputs that are the same at each call, in a list; see `outputs` */
    PyObject *generators;           /* (index, generator) of each input that is one, and must be that one */
    PyObject *table;                /* capsule of `bind`; None: the recording is closed */
    PyObject *launch;               /* the address of an int (*)(void *executable, void *stream), or called with these */
    PyObject *fail;                 /* called with what the function at that address has returned, if that is not 0; raises */
    PyObject *expect;               /* None, or called with the stream: raises if launches may not go there now */
    int32_t (*current_stream)(int32_t device, void **stream); /* of libtorch; NULL: there is only the default stream, 0 */
    int (*is_capturing)(void *stream, int *status);           /* of the driver */
    int device;
    PyObject **memory;              /* what a call allocates; NULLs between calls */
    Py_ssize_t *indices;
    PyCFunction allocator;          /* of `allocate`, if it is a function in C that takes a tuple; NULL: it is not */
    PyThread_type_lock lock;        /* a call holds it from its first look at the table to its last output */
    unsigned long holder;           /* the thread that holds it; 0: none */
    long long replays, relocated, written, fused, next_check, used;
} FusedReplay;

static long long uses; /* orders the calls of all recordings */

#define OBJECTS(self)                                                                                                            \
    {&self->allocate, &self->arguments, &self->targets, &self->plan, &self->blank, &self->generators, \
     &self->table, &self->launch, &self->fail, &self->expect}

static void free_replay(PyObject *object) {
    FusedReplay *self = (FusedReplay *)object;
    PyObject **all[] = OBJECTS(self);
    for (size_t i = 0; i < sizeof(all) / sizeof(*all); i++) Py_CLEAR(*all[i]);
    PyMem_Free(self->memory);
    PyMem_Free(self->indices);
    if (self->lock != NULL) PyThread_free_lock(self->lock);
    Py_TYPE(object)->tp_free(object);
}

static int are_tuples(PyObject *tuple) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); i++)
        if (!PyTuple_Check(PyTuple_GET_ITEM(tuple, i))) {
            PyErr_SetString(PyExc_TypeError, "what an allocation is called with is a tuple");
            return 0;
        }
    return 1;
}

/* Returns the indices in a tuple, each of which is below the length of the tuple and comes once; NULL with an exception set. */
static Py_ssize_t *indices_of(PyObject *tuple) {
    Py_ssize_t count = PyTuple_GET_SIZE(tuple), *indices = PyMem_Malloc((count + 1) * sizeof(Py_ssize_t));
    if (indices == NULL) return (Py_ssize_t *)PyErr_NoMemory();
    for (Py_ssize_t i = 0; i < count && !PyErr_Occurred(); i++) {
        indices[i] = PyLong_AsSsize_t(PyTuple_GET_ITEM(tuple, i));
        int is_sound = indices[i] >= 0 && indices[i] < count;
        for (Py_ssize_t j = 0; j < i; j++) is_sound &= indices[j] != indices[i];
        if (!PyErr_Occurred() && !is_sound) PyErr_SetString(PyExc_ValueError, "allocations do not go to one memory each");
    }
    if (!PyErr_Occurred()) return indices;
    PyMem_Free(indices);
    return NULL;
}

static int begin_replay(FusedReplay *self) {
    if (PyCapsule_GetPointer(self->plan, PLAN) == NULL || PyCapsule_GetPointer(self->table, TABLE) == NULL) return -1;
    if (!are_tuples(self->arguments) || !are_tuples(self->generators)) return -1;
    if (PyTuple_GET_SIZE(self->targets) != PyTuple_GET_SIZE(self->arguments)) {
        PyErr_SetString(PyExc_ValueError, "there are not as many targets as allocations");
        return -1;
    }
    self->indices = indices_of(self->targets);
    if (self->indices == NULL) return -1;
    int takes_tuple = PyCFunction_CheckExact(self->allocate) && PyCFunction_GET_FLAGS(self->allocate) == METH_VARARGS;
    self->allocator = takes_tuple ? PyCFunction_GET_FUNCTION(self->allocate) : NULL;
    self->memory = PyMem_Calloc(PyTuple_GET_SIZE(self->targets) + 1, sizeof(PyObject *));
    self->lock = PyThread_allocate_lock();
    if (self->memory != NULL && self->lock != NULL) return 0;
    PyErr_NoMemory();
    return -1;
}

static PyObject *new_replay(PyTypeObject *type, PyObject *args, PyObject *keywords) {
    FusedReplay *self = (FusedReplay *)type->tp_alloc(type, 0);
    if (self == NULL) return NULL;
    unsigned long long current_stream, is_capturing;
    int parsed = PyArg_ParseTuple(args, "OO!O!OO!KiKO!OOOO", &self->allocate, &PyTuple_Type, &self->arguments, &PyTuple_Type,
                                  &self->targets, &self->plan, &PyList_Type, &self->blank, &current_stream, &self->device, &is_capturing,
                                  &PyTuple_Type, &self->generators, &self->table, &self->launch, &self->fail, &self->expect);
    PyObject **all[] = OBJECTS(self);
    for (size_t i = 0; i < sizeof(all) / sizeof(*all); i++) Py_XINCREF(*all[i]);
    self->next_check = PY_SSIZE_T_MAX;
    if (parsed) self->current_stream = (int32_t(*)(int32_t, void **))(uintptr_t)current_stream;
    if (parsed) self->is_capturing = (int (*)(void *, int *))(uintptr_t)is_capturing;
    if (parsed && begin_replay(self) == 0) return (PyObject *)self;
    Py_DECREF(self);
    return NULL;
}

/* Waits until no other thread is in a call. Returns 0 if this thread is in one: a signal handler or a finalizer may call again. */
static int enter(FusedReplay *self) {
    unsigned long thread = PyThread_get_thread_ident();
    if (self->holder == thread) return 0;
    if (!PyThread_acquire_lock(self->lock, NOWAIT_LOCK)) {
        Py_BEGIN_ALLOW_THREADS
        PyThread_acquire_lock(self->lock, WAIT_LOCK);
        Py_END_ALLOW_THREADS
    }
    self->holder = thread;
    return 1;
}

static void leave(FusedReplay *self) {
    self->holder = 0;
    PyThread_release_lock(self->lock);
}

static PyObject *enter_replay(PyObject *self, PyObject *none) {
    if (enter((FusedReplay *)self)) return Py_NewRef(self);
    PyErr_SetString(PyExc_RuntimeError, "the recording is called within a call of it");
    return NULL;
}

static PyObject *leave_replay(PyObject *self, PyObject *args) {
    leave((FusedReplay *)self);
    Py_RETURN_NONE;
}

static PyObject *is_held_here(PyObject *self, PyObject *none) {
    return PyBool_FromLong(((FusedReplay *)self)->holder == PyThread_get_thread_ident());
}

/* Returns -1 with an exception set. */
static int allocate(FusedReplay *self) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(self->arguments); i++) {
        PyObject *each = PyTuple_GET_ITEM(self->arguments, i);
        PyObject *made = self->allocator != NULL ? self->allocator(PyCFunction_GET_SELF(self->allocate), each)
                                                 : PyObject_Call(self->allocate, each, NULL);
        if (made == NULL) return -1;
        self->memory[self->indices[i]] = made;
    }
    return 0;
}

/* Launches by a function of the driver, without Python, or by whatever is called with an executable and a stream. */
static PyObject *launched_by(const FusedReplay *self, uint64_t executable, void *stream) {
    if (!PyLong_CheckExact(self->launch)) return PyObject_CallFunction(self->launch, "KK", (unsigned long long)executable, (unsigned long long)(uintptr_t)stream);
    int (*launch)(void *, void *) = (int (*)(void *, void *))PyLong_AsVoidPtr(self->launch);
    if (launch == NULL) return NULL;
    int code;
    Py_BEGIN_ALLOW_THREADS /* it may wait for a launch that waits for a callback in Python */
    code = launch((void *)executable, stream);
    Py_END_ALLOW_THREADS
    return code == 0 ? Py_NewRef(Py_None) : PyObject_CallFunction(self->fail, "i", code);
}

static int are_same_generators(const FusedReplay *self, PyObject *inputs) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(self->generators); i++) {
        PyObject *pair = PyTuple_GET_ITEM(self->generators, i);
        Py_ssize_t index = PyTuple_GET_SIZE(pair) == 2 ? PyLong_AsSsize_t(PyTuple_GET_ITEM(pair, 0)) : -1;
        if (index < 0 || index >= PyList_GET_SIZE(inputs) || PyList_GET_ITEM(inputs, index) != PyTuple_GET_ITEM(pair, 1)) {
            PyErr_Clear();
            return 0;
        }
    }
    return 1;
}

/* Returns the executable that serves a call, with what it allocates in `memory`; NULL with an exception set, or without one if none does. */
static const Executable *ready(FusedReplay *self, Table *table, PyObject *inputs, void *stream) {
    if (self->expect != Py_None) {
        PyObject *expected = PyObject_CallFunction(self->expect, "K", (unsigned long long)(uintptr_t)stream);
        if (expected == NULL) return NULL;
        Py_DECREF(expected);
    }
    /* Addresses are read first, so that nothing is allocated for inputs that are no tensors. */
    if (!read_inputs(table, inputs) || allocate(self) < 0 || !read_memory(table, self->memory, PyTuple_GET_SIZE(self->targets))) return NULL;
    return bound_executable(table, stream);
}

/* Returns the outputs of a call, and in `launched` the result of the launch; NULL with an exception set, or without one if it cannot serve the call. Holds `lock`. */
static PyObject *served(FusedReplay *self, PyObject *inputs, void *stream, PyObject **launched) {
    if (self->table == Py_None || !are_same_generators(self, inputs)) return NULL;
    PyObject *result = NULL, *table = Py_NewRef(self->table);
    Table *numbers = PyCapsule_GetPointer(table, TABLE);
    Py_ssize_t allocations = PyTuple_GET_SIZE(self->targets);
    const Executable *found = numbers == NULL ? NULL : ready(self, numbers, inputs, stream);
    /* A profiler may have begun since `run` looked, while another thread had the lock. */
    if (found != NULL && !(numbers->unprofiled && is_profiled())) {
        Py_ssize_t written = numbers->written;
        *launched = launched_by(self, found->handle, stream);
        if (*launched != NULL) {
            self->replays++, self->fused++, self->relocated += written > 0, self->written += written, self->used = ++uses;
            result = outputs(PyCapsule_GetPointer(self->plan, PLAN), self->memory, allocations, inputs, self->blank);
        }
    }
    for (Py_ssize_t i = 0; i < allocations; i++) Py_CLEAR(self->memory[i]);
    Py_DECREF(table);
    return result;
}

/* Calls `served` for one thread at a time, and clears the list of inputs. Serves no call within a call. */
static PyObject *replayed(FusedReplay *self, PyObject *inputs, void *stream, PyObject **launched) {
    if (!enter(self)) return NULL;
    PyObject *result = served(self, inputs, stream, launched);
    leave(self);
    if (result != NULL && PyList_SetSlice(inputs, 0, PyList_GET_SIZE(inputs), NULL) < 0) Py_CLEAR(result);
    return result;
}

/* Returns whether the current stream is known, with its handle in `stream`. */
static int find_stream(const FusedReplay *self, void **stream) {
    *stream = NULL;
    return self->current_stream == NULL || self->current_stream(self->device, stream) == 0;
}

static int is_captured(const FusedReplay *self, void *stream) {
    int status = 0;
    return self->is_capturing != NULL && (self->is_capturing(stream, &status) != 0 || status != 0);
}

/* Marks the exception that is set as one that came after a launch. */
static void mark_after_launch(void) {
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyErr_NormalizeException(&type, &value, &trace);
    if (value != NULL && PyObject_SetAttrString(value, "is_after_launch", Py_True) < 0) PyErr_Clear();
    PyErr_Restore(type, value, trace);
}

/* fused_replay(inputs) */
static PyObject *call_replay(PyObject *self, PyObject *args, PyObject *keywords) {
    PyObject *inputs, *launched = NULL;
    void *stream;
    if (!PyArg_ParseTuple(args, "O!", &PyList_Type, &inputs)) return NULL;
    PyObject *result = find_stream((FusedReplay *)self, &stream) ? replayed((FusedReplay *)self, inputs, stream, &launched) : NULL;
    PyObject *both = result == NULL ? NULL : PyTuple_Pack(2, result, launched);
    if (both == NULL && launched != NULL && PyErr_Occurred()) mark_after_launch();
    Py_XDECREF(result);
    Py_XDECREF(launched);
    return both == NULL && !PyErr_Occurred() ? Py_NewRef(Py_None) : both;
}

static PyMethodDef replay_methods[] = {{"__enter__", enter_replay, METH_NOARGS, "Wait until no other thread is in a call."},
                                       {"__exit__", leave_replay, METH_VARARGS, "Let other threads call it."},
                                       {"is_held_here", is_held_here, METH_NOARGS, "Return whether this thread is in a call, or between enter and exit."},
                                       {NULL, NULL, 0, NULL}};

static PyMemberDef replay_members[] = {
    {"arguments", T_OBJECT_EX, offsetof(FusedReplay, arguments), 0, "What the allocator is called with: as many tuples as at first."},
    {"table", T_OBJECT_EX, offsetof(FusedReplay, table), 0, "The capsule of `table`; None: the recording is closed."},
    {"launch", T_OBJECT_EX, offsetof(FusedReplay, launch), 0, "The address of a function of C, or called with executable and stream."},
    {"expect", T_OBJECT_EX, offsetof(FusedReplay, expect), 0, "None, or called with the stream before a launch."},
    {"replays", T_LONGLONG, offsetof(FusedReplay, replays), 0, "Calls served."},
    {"relocated", T_LONGLONG, offsetof(FusedReplay, relocated), 0, "Calls for which a node was written."},
    {"written", T_LONGLONG, offsetof(FusedReplay, written), 0, "Nodes written."},
    {"fused", T_LONGLONG, offsetof(FusedReplay, fused), 0, "Calls served by the helper alone."},
    {"next_check", T_LONGLONG, offsetof(FusedReplay, next_check), 0, "From this number of replays on, `run` leaves calls to the owner."},
    {"used", T_LONGLONG, offsetof(FusedReplay, used), 0, "When it was used last, as `tick` counts."},
    {NULL}};

static PyTypeObject replay_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "pygraph.FusedReplay",
    .tp_doc = "FusedReplay(allocate, arguments, targets, plan, blank, current_stream, device, is_capturing, generators, table, launch, fail, expect)",
    .tp_basicsize = sizeof(FusedReplay),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = new_replay,
    .tp_dealloc = free_replay,
    .tp_call = call_replay,
    .tp_methods = replay_methods,
    .tp_members = replay_members,
};

static PyObject *tick(PyObject *module, PyObject *none) { return PyLong_FromLongLong(++uses); }

/* --- from a call of a compiled callable to its recording --------------------------------------------------------------- */

/* Returns the recording for the integers among the inputs, or NULL without an exception. */
static FusedReplay *replay_of(PyObject *replays, PyObject *integers, PyObject *inputs) {
    PyObject *size = PyTuple_New(PyList_GET_SIZE(integers)), *found = NULL;
    for (Py_ssize_t i = 0; size != NULL && i < PyTuple_GET_SIZE(size); i++) {
        PyObject *each = item(inputs, PyLong_AsSsize_t(PyList_GET_ITEM(integers, i)));
        if (each == NULL) Py_CLEAR(size);
        else PyTuple_SET_ITEM(size, i, Py_NewRef(each));
    }
    if (size != NULL) found = PyDict_GetItemWithError(replays, size);
    Py_XDECREF(size);
    PyErr_Clear();
    return found != NULL && Py_TYPE(found) == &replay_type ? (FusedReplay *)Py_NewRef(found) : NULL;
}

/* Returns whether each function returns the value beside it. Clears exceptions: the owner calls the function again, and raises. */
static int hold(PyObject *conditions) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(conditions); i++) {
        PyObject *pair = PyTuple_GET_ITEM(conditions, i);
        if (!PyTuple_Check(pair) || PyTuple_GET_SIZE(pair) != 2) return 0;
        PyObject *value = PyObject_CallNoArgs(PyTuple_GET_ITEM(pair, 0));
        int holds = value == NULL ? 0 : PyObject_RichCompareBool(value, PyTuple_GET_ITEM(pair, 1), Py_EQ);
        Py_XDECREF(value);
        if (holds != 1) {
            PyErr_Clear();
            return 0;
        }
    }
    return 1;
}

/* Returns whether the tensors at some indices of the inputs are no conjugate or negative views: kernels of a recording would miss the bit. */
static int are_plain(PyObject *indices, PyObject *inputs) {
    static PyObject *names[2];
    if (names[0] == NULL) names[0] = PyUnicode_InternFromString("is_conj");
    if (names[1] == NULL) names[1] = PyUnicode_InternFromString("is_neg");
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(indices); i++) {
        PyObject *each = item(inputs, PyLong_AsSsize_t(PyTuple_GET_ITEM(indices, i)));
        int is_plain = each != NULL;
        for (int j = 0; is_plain && is_tensor(each) && j < 2; j++) {
            PyObject *found = names[j] == NULL ? NULL : PyObject_CallMethodNoArgs(each, names[j]);
            is_plain = found == Py_False;
            Py_XDECREF(found);
        }
        if (!is_plain) {
            PyErr_Clear();
            return 0;
        }
    }
    return 1;
}

/* Has the owner deal with the exception that is set. */
static PyObject *failed(PyObject *owner, PyObject *inputs) {
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    if (traceback != NULL) PyException_SetTraceback(value, traceback);
    PyObject *result = PyObject_CallMethod(owner, "replay_failed", "OO", inputs, value);
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(traceback);
    return result;
}

/* run(replays, integers, conditions, tangents, owner, inputs) */
static PyObject *run(PyObject *module, PyObject *const *args, Py_ssize_t given) {
    enum { REPLAYS, INTEGERS, CONDITIONS, TANGENTS, OWNER, INPUTS, ARGUMENTS };
    if (given != ARGUMENTS || !PyDict_Check(args[REPLAYS]) || !PyList_Check(args[INTEGERS]) || !PyTuple_Check(args[CONDITIONS]) || !PyTuple_Check(args[TANGENTS])) {
        PyErr_SetString(PyExc_TypeError, "a dict, a list, two tuples, an owner and inputs are wanted");
        return NULL;
    }
    PyObject *inputs = args[INPUTS], *owner = args[OWNER], *launched = NULL, *result = NULL;
    FusedReplay *replay = PyList_Check(inputs) ? replay_of(args[REPLAYS], args[INTEGERS], inputs) : NULL;
    void *stream;
    if (replay == NULL || replay->replays >= replay->next_check || is_profiled() || !hold(args[CONDITIONS]) || !are_plain(args[TANGENTS], inputs) ||
        !find_stream(replay, &stream) || is_captured(replay, stream)) {
        Py_XDECREF(replay);
        return PyObject_CallOneArg(owner, inputs);
    }
    result = replayed(replay, inputs, stream, &launched);
    Py_DECREF(replay);
    /* After a launch an error is raised: the kernels must not write to inputs a second time. */
    int was_launched = launched != NULL;
    Py_XDECREF(launched);
    if (result != NULL || was_launched) return result;
    return PyErr_Occurred() ? failed(owner, inputs) : PyObject_CallMethod(owner, "run_in_python", "O", inputs);
}
