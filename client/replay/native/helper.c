/* Does the work of a replay on hundreds of tensors in one call: reads their addresses, and makes tensors.
 *
 * Built by `client/replay/native/build.py` with nothing but a C compiler and Python's headers. `configure` receives four functions of
 * libtorch's stable C interface, the function that wraps a tensor in a Python object, and the offset of the tensor in that object. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

static struct {
    PyTypeObject *type;
    PyTypeObject *subtypes[2]; /* that were seen last, as a program has tensors and parameters */
    Py_ssize_t offset;
    int32_t (*get_data_ptr)(void *tensor, void **address);
    int32_t (*reinterpret)(void *tensor, int64_t dimensions, const int64_t *size, const int64_t *stride, int64_t offset,
                           void **made);
    int32_t (*view_as)(void *tensor, int32_t dtype, void **made);
    int32_t (*destroy)(void *tensor);
    PyObject *(*wrap)(void *tensor); /* moves the tensor into the object */
    struct {
        PyObject *flags, *key;
    } profilers[2]; /* `flags[key]` of the first is True while a profiler runs, of the second while it is made ready */
} torch;

static PyObject *configure(PyObject *module, PyObject *args) {
    PyObject *type, *flags[2], *keys[2];
    Py_ssize_t offset;
    unsigned long long get_data_ptr, reinterpret, view_as, destroy, wrap;
    if (!PyArg_ParseTuple(args, "O!nO!UO!UKKKKK", &PyType_Type, &type, &offset, &PyDict_Type, &flags[0], &keys[0], &PyDict_Type,
                          &flags[1], &keys[1], &get_data_ptr, &reinterpret, &view_as, &destroy, &wrap))
        return NULL;
    Py_INCREF(type); /* for good: what was configured before may be in use */
    for (int i = 0; i < 2; i++) {
        torch.profilers[i].flags = Py_NewRef(flags[i]);
        torch.profilers[i].key = Py_NewRef(keys[i]);
    }
    torch.type = (PyTypeObject *)type;
    for (int i = 0; i < 2; i++) Py_CLEAR(torch.subtypes[i]);
    torch.offset = offset;
    torch.get_data_ptr = (int32_t(*)(void *, void **))(uintptr_t)get_data_ptr;
    torch.reinterpret = (int32_t(*)(void *, int64_t, const int64_t *, const int64_t *, int64_t, void **))(uintptr_t)reinterpret;
    torch.view_as = (int32_t(*)(void *, int32_t, void **))(uintptr_t)view_as;
    torch.destroy = (int32_t(*)(void *))(uintptr_t)destroy;
    torch.wrap = (PyObject * (*)(void *))(uintptr_t)wrap;
    Py_RETURN_NONE;
}

/* Returns whether a type that was not seen lately is a subtype of Tensor. */
static int is_subtype(PyTypeObject *type) {
    if (torch.type == NULL || !PyType_IsSubtype(type, torch.type)) return 0;
    Py_INCREF(type); /* no other type must get its address */
    PyTypeObject *oldest = torch.subtypes[1];
    torch.subtypes[1] = torch.subtypes[0];
    torch.subtypes[0] = type;
    Py_XDECREF(oldest);
    return 1;
}

/* Caches types: asking Python for each of hundreds of tensors takes as long as the rest of a call. */
static inline int is_tensor(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    return type == torch.subtypes[0] || type == torch.subtypes[1] || is_subtype(type);
}

/* Returns the C++ tensor in an object, borrowed, or NULL with an exception set. */
static void *tensor_of(PyObject *object) {
    if (!is_tensor(object)) {
        PyErr_SetString(PyExc_TypeError, "not a tensor, or `configure` was not called");
        return NULL;
    }
    return (char *)object + torch.offset;
}

static inline int is_profiled(void) {
    for (int i = 0; i < 2; i++) {
        PyObject *flags = torch.profilers[i].flags;
        if (flags != NULL && PyDict_GetItem(flags, torch.profilers[i].key) == Py_True) return 1;
    }
    return 0;
}

static PyObject *beyond_the_end(void) {
    PyErr_SetString(PyExc_IndexError, "an index is beyond the end of a list");
    return NULL;
}

/* Returns an item of a list, borrowed, or NULL with an exception set. */
static PyObject *item(PyObject *list, Py_ssize_t index) {
    return index >= 0 && index < PyList_GET_SIZE(list) ? PyList_GET_ITEM(list, index) : beyond_the_end();
}

static int are_lists(PyObject *const *args, Py_ssize_t given, Py_ssize_t wanted) {
    int right = given == wanted;
    for (Py_ssize_t i = 0; right && i < wanted; i++) right = PyList_Check(args[i]);
    if (!right) PyErr_Format(PyExc_TypeError, "%zd lists are wanted", wanted);
    return right;
}

/* --- making tensors ----------------------------------------------------------------------------------------------------------- */

#define PLAN "pygraph.plan"
#define MAX_DIMENSIONS 64
#define ITSELF -2
#define OUTPUT -3

/* One tensor to be made: `from` counts through memories if it is not negative, else it is ~index of an input; `dtype` is -1 if it
 * is of the same type as that, -2 if it is that itself, and `offset` in elements of its own. If `dtype` is -3, it is the output at
 * `from`, the same object; such pieces come last. */
typedef struct {
    Py_ssize_t target, from;
    int32_t dtype;
    int64_t offset, dimensions;
    int64_t *size, *stride;
} Piece;

typedef struct {
    Py_ssize_t count;
    Piece *pieces;
    int64_t *numbers;
} Plan;

static void free_plan(Plan *plan) {
    PyMem_Free(plan->pieces);
    PyMem_Free(plan->numbers);
    PyMem_Free(plan);
}

static void free_capsule(PyObject *capsule) { free_plan(PyCapsule_GetPointer(capsule, PLAN)); }

static int read_numbers(PyObject *tuple, int64_t *numbers) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); i++) {
        numbers[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(tuple, i));
        if (numbers[i] == -1 && PyErr_Occurred()) return -1;
    }
    return 0;
}

/* Reads (target, from, dtype, offset, size, stride) into a piece whose numbers begin at `numbers`; returns -1 with an exception set. */
static int read_piece(PyObject *tuple, Piece *piece, int64_t *numbers) {
    PyObject *size, *stride;
    long long offset;
    if (!PyTuple_Check(tuple)) {
        PyErr_SetString(PyExc_TypeError, "a piece is a tuple");
        return -1;
    }
    int dtype;
    if (!PyArg_ParseTuple(tuple, "nniLO!O!", &piece->target, &piece->from, &dtype, &offset, &PyTuple_Type, &size, &PyTuple_Type,
                          &stride))
        return -1;
    piece->dtype = dtype;
    piece->offset = offset;
    piece->dimensions = PyTuple_GET_SIZE(size);
    if (piece->dimensions > MAX_DIMENSIONS || piece->dimensions != PyTuple_GET_SIZE(stride)) {
        PyErr_SetString(PyExc_ValueError, "a size and its strides differ in length, or are too long");
        return -1;
    }
    piece->size = numbers;
    piece->stride = numbers + piece->dimensions;
    return read_numbers(size, piece->size) < 0 || read_numbers(stride, piece->stride) < 0 ? -1 : 0;
}

static PyObject *plan(PyObject *module, PyObject *const *args, Py_ssize_t given) {
    if (!are_lists(args, given, 1)) return NULL;
    Py_ssize_t count = PyList_GET_SIZE(args[0]);
    Plan *made = PyMem_Calloc(1, sizeof(Plan));
    if (made == NULL) return PyErr_NoMemory();
    made->count = count;
    made->pieces = PyMem_Calloc(count + 1, sizeof(Piece));
    made->numbers = PyMem_Calloc(count + 1, 2 * MAX_DIMENSIONS * sizeof(int64_t));
    int failed = made->pieces == NULL || made->numbers == NULL;
    if (failed) PyErr_NoMemory();
    int64_t *numbers = made->numbers;
    for (Py_ssize_t i = 0; !failed && i < count; i++) {
        failed = read_piece(PyList_GET_ITEM(args[0], i), &made->pieces[i], numbers) < 0;
        numbers += 2 * made->pieces[i].dimensions; /* one after the other: they are read at every call */
    }
    PyObject *capsule = failed ? NULL : PyCapsule_New(made, PLAN, free_capsule);
    if (capsule == NULL) free_plan(made);
    return capsule;
}

/* Caches the latest tensor that was viewed as another dtype: a view costs most, and the next piece often needs the same one. */
typedef struct {
    Py_ssize_t from;
    int32_t dtype;
    void *tensor; /* NULL: none */
} View;

static void forget(View *view) {
    if (view->tensor != NULL) torch.destroy(view->tensor);
    view->tensor = NULL;
}

/* Returns 0 and, in `view`, the tensor viewed with the dtype of a piece. */
static int see(View *view, void *tensor, const Piece *piece) {
    if (view->tensor != NULL && view->from == piece->from && view->dtype == piece->dtype) return 0;
    forget(view);
    view->from = piece->from;
    view->dtype = piece->dtype;
    return torch.view_as(tensor, piece->dtype, &view->tensor);
}

static PyObject *make(const Piece *piece, PyObject *base, View *view) {
    if (base == NULL || piece->dtype == ITSELF || piece->dtype == OUTPUT) return Py_XNewRef(base);
    void *made, *tensor = tensor_of(base);
    if (tensor == NULL) return NULL;
    int failed = piece->dtype >= 0 && see(view, tensor, piece) != 0;
    if (piece->dtype >= 0) tensor = view->tensor;
    failed = failed || torch.reinterpret(tensor, piece->dimensions, piece->size, piece->stride, piece->offset, &made) != 0;
    if (failed) {
        PyErr_SetString(PyExc_RuntimeError, "a tensor cannot be made over another's memory");
        return NULL;
    }
    PyObject *object = torch.wrap(made);
    torch.destroy(made);
    return object;
}

/* Returns the object in a tuple that is being filled; NULL with an exception set if there is none yet. */
static PyObject *made_before(PyObject *tuple, Py_ssize_t index) {
    PyObject *object = index >= 0 && index < PyTuple_GET_SIZE(tuple) ? PyTuple_GET_ITEM(tuple, index) : NULL;
    if (object == NULL) PyErr_SetString(PyExc_IndexError, "a piece is an output that is not made before it");
    return object;
}

/* Returns a tuple of the objects that a plan makes over memory and inputs, and of those in `blank` in the other places. */
static PyObject *outputs(const Plan *plan, PyObject *const *memory, Py_ssize_t size, PyObject *inputs, PyObject *blank) {
    PyObject *result = PyTuple_New(PyList_GET_SIZE(blank));
    View view = {0, 0, NULL};
    for (const Piece *piece = plan->pieces; result != NULL && piece < plan->pieces + plan->count; piece++) {
        PyObject *base = piece->dtype == OUTPUT ? made_before(result, piece->from)
                         : piece->from < 0      ? item(inputs, ~piece->from)
                         : piece->from < size   ? memory[piece->from]
                                                : beyond_the_end();
        PyObject *object = item(blank, piece->target) == NULL ? NULL : make(piece, base, &view);
        if (object == NULL) Py_CLEAR(result);
        else Py_XSETREF(((PyTupleObject *)result)->ob_item[piece->target], object);
    }
    forget(&view);
    for (Py_ssize_t i = 0; result != NULL && i < PyTuple_GET_SIZE(result); i++)
        if (PyTuple_GET_ITEM(result, i) == NULL) PyTuple_SET_ITEM(result, i, Py_NewRef(PyList_GET_ITEM(blank, i)));
    return result;
}

static PyObject *fill(PyObject *module, PyObject *const *args, Py_ssize_t given) {
    if (given < 1 || !are_lists(args + 1, given - 1, 3)) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "a plan and 3 lists are wanted");
        return NULL;
    }
    const Plan *plan = PyCapsule_GetPointer(args[0], PLAN);
    return plan == NULL ? NULL : outputs(plan, ((PyListObject *)args[1])->ob_item, PyList_GET_SIZE(args[1]), args[2], args[3]);
}

#include "exec_table.h"
#include "fused_replay.h"
#include "capture_arena.h"

static PyMethodDef methods[] = {
    {"configure", configure, METH_VARARGS,
     "configure(type, offset, flags, key, flags, key, get_data_ptr, reinterpret, view_as, destroy, wrap): the tensor type, its C++ pointer's\n"
     "offset, two dicts and the keys under which one has True while a profiler runs and the other while it is ready, and functions."},
    {"plan", (PyCFunction)(void (*)(void))plan, METH_FASTCALL,
     "plan(pieces): return the plan of `fill`; a piece is (target, from, dtype, offset, size, stride), `from` a memory or ~input."},
    {"fill", (PyCFunction)(void (*)(void))fill, METH_FASTCALL,
     "fill(plan, memory, inputs, blank): return a tuple of what `blank` has, with the tensors over memory and inputs in their places."},
    {"table", table, METH_VARARGS,
     "table(numbers, words, executable, limit, worth, idle, make, fail): return the table of a graph with one executable (0: it is made at\n"
     "the first call), and `limit` at most; `numbers`: see `table_numbers`. make(stream, replaced) returns another executable, in place of one\n"
     "(0: of none), 0 if there can be none now, None if none is to be asked for but in place of another one, or raises; fail(code, node) raises."},
    {"keep_from_profiles", keep_from_profiles, METH_O,
     "keep_from_profiles(table): have no executable of it be launched by run() and FusedReplay while a profiler runs."},
    {"bind", (PyCFunction)(void (*)(void))bind, METH_FASTCALL,
     "bind(table, inputs, memory, stream): return (executable, number of nodes written), or None if the call does not fit."},
    {"kernel_functions", kernel_functions, METH_NOARGS,
     "kernel_functions(): return the addresses of functions that launch a kernel and write a node, where a graph is one kernel."},
    {"arena_range", arena_range, METH_VARARGS,
     "arena_range(next, end): have the functions of `arena_functions` hand out these addresses; return the next one of the range before."},
    {"arena_functions", arena_functions, METH_NOARGS,
     "arena_functions(): return the addresses of functions that allocate and release, for a pluggable allocator of PyTorch's."},
    {"tick", tick, METH_NOARGS, "tick(): return the next number in the order of all calls."},
    {"run", (PyCFunction)(void (*)(void))run, METH_FASTCALL,
     "run(replays, integers, conditions, tangents, owner, inputs): serve a call by the FusedReplay of its size, the inputs at `integers`, if\n"
     "each of `conditions`, a (function, value), holds, no input at `tangents` is a conjugate or negative view, no profiler runs and no\n"
     "capture of the current stream. Otherwise call owner(inputs), owner.run_in_python(inputs) or\n"
     "owner.replay_failed(inputs, exception)."},
    {NULL, NULL, 0, NULL}};

/* Initialised in two phases, so that it is not entered in `sys.modules`, where a user's module may have this name. */
static int add_types(PyObject *module) { return PyModule_AddType(module, &replay_type); }

static PyModuleDef_Slot slots[] = {{Py_mod_exec, add_types}, {0, NULL}};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "helper", "Serves calls of recordings, with many tensors at once.", 0, methods,
                                        slots, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_helper(void) { return PyModuleDef_Init(&definition); }
