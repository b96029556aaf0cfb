/* A whole call of a graph: looks where its inputs lie, allocates, binds, launches, and makes what is returned.
 *
 * Part of `helper.c`. What it does one after the other is what `client/replay/replay.py` does step by step: there, each step is a few calls
 * of Python's, and of 100 us that a call of 300 tensors took, 20 were spent between the steps. */

/* What is the same at every call. */
typedef struct {
    PyObject *allocate;  /* called with each of */
    PyObject *arguments; /* a tuple of tuples; what comes of each goes */
    Py_ssize_t *slots;   /* to one of these indices of the memory. */
    PyObject *plan;      /* of `fill` */
    PyObject *picks;     /* of `gather` */
} Recipe;

#define RECIPE "pygraph.recipe"

static void free_recipe(PyObject *capsule) {
    Recipe *recipe = PyCapsule_GetPointer(capsule, RECIPE);
    Py_XDECREF(recipe->allocate);
    Py_XDECREF(recipe->arguments);
    PyMem_Free(recipe->slots);
    Py_XDECREF(recipe->plan);
    Py_XDECREF(recipe->picks);
    PyMem_Free(recipe);
}

static int are_tuples(PyObject *tuple) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); i++)
        if (!PyTuple_Check(PyTuple_GET_ITEM(tuple, i))) {
            PyErr_SetString(PyExc_TypeError, "what an allocation is called with is a tuple");
            return 0;
        }
    return 1;
}

/* Returns a copy of a tuple's numbers, or NULL with an exception set. */
static Py_ssize_t *read_slots(PyObject *tuple) {
    Py_ssize_t *slots = PyMem_Malloc((PyTuple_GET_SIZE(tuple) + 1) * sizeof(Py_ssize_t));
    if (slots == NULL) return (Py_ssize_t *)PyErr_NoMemory();
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); i++) slots[i] = PyLong_AsSsize_t(PyTuple_GET_ITEM(tuple, i));
    if (!PyErr_Occurred()) return slots;
    PyMem_Free(slots);
    return NULL;
}

static PyObject *recipe(PyObject *module, PyObject *args) {
    PyObject *allocate, *arguments, *slots, *plan, *picks;
    if (!PyArg_ParseTuple(args, "OO!O!OO", &allocate, &PyTuple_Type, &arguments, &PyTuple_Type, &slots, &plan, &picks)) return NULL;
    if (PyCapsule_GetPointer(plan, PLAN) == NULL || PyCapsule_GetPointer(picks, PICKS) == NULL || !are_tuples(arguments)) return NULL;
    if (PyTuple_GET_SIZE(slots) != PyTuple_GET_SIZE(arguments)) {
        PyErr_SetString(PyExc_ValueError, "there are not as many slots as allocations");
        return NULL;
    }
    Recipe *made = PyMem_Malloc(sizeof(Recipe));
    Py_ssize_t *indices = made == NULL ? NULL : read_slots(slots);
    if (indices == NULL) {
        PyMem_Free(made);
        return PyErr_Occurred() ? NULL : PyErr_NoMemory();
    }
    *made = (Recipe){Py_NewRef(allocate), Py_NewRef(arguments), indices, Py_NewRef(plan), Py_NewRef(picks)};
    PyObject *capsule = PyCapsule_New(made, RECIPE, free_recipe);
    if (capsule == NULL) PyMem_Free(made);
    return capsule;
}

/* Returns -1 with an exception set, and with some of it in `memory`. */
static int allocate(const Recipe *recipe, PyObject *memory) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(recipe->arguments); i++) {
        PyObject *made = PyObject_Call(recipe->allocate, PyTuple_GET_ITEM(recipe->arguments, i), NULL);
        if (made == NULL || PyList_SetItem(memory, recipe->slots[i], made) < 0) return -1;
    }
    return 0;
}

/* Leaves what was allocated to whoever was given it. */
static void let_go(const Recipe *recipe, PyObject *memory) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(recipe->arguments); i++)
        if (recipe->slots[i] >= 0 && recipe->slots[i] < PyList_GET_SIZE(memory)) PyList_SetItem(memory, recipe->slots[i], Py_NewRef(Py_None));
}

/* A function of the driver's that launches. */
typedef struct {
    int (*launch)(void *executable, void *stream);
    PyObject *fail; /* called with what that has returned, if it is not 0; raises */
} Launcher;

#define LAUNCHER "pygraph.launcher"

static void free_launcher(PyObject *capsule) {
    Launcher *launcher = PyCapsule_GetPointer(capsule, LAUNCHER);
    Py_XDECREF(launcher->fail);
    PyMem_Free(launcher);
}

static PyObject *launcher(PyObject *module, PyObject *args) {
    unsigned long long launch;
    PyObject *fail;
    if (!PyArg_ParseTuple(args, "KO", &launch, &fail)) return NULL;
    Launcher *made = PyMem_Malloc(sizeof(Launcher));
    if (made == NULL) return PyErr_NoMemory();
    *made = (Launcher){(int (*)(void *, void *))(uintptr_t)launch, Py_NewRef(fail)};
    PyObject *capsule = PyCapsule_New(made, LAUNCHER, free_launcher);
    if (capsule == NULL) {
        Py_DECREF(fail);
        PyMem_Free(made);
    }
    return capsule;
}

/* Launches by what launches: a function, called without Python, or anything that is called with an executable and a stream. */
static PyObject *launched_by(PyObject *launch, uint64_t executable, PyObject *stream) {
    if (!PyCapsule_CheckExact(launch)) return PyObject_CallFunction(launch, "KO", (unsigned long long)executable, stream);
    const Launcher *launcher = PyCapsule_GetPointer(launch, LAUNCHER);
    void *on = launcher == NULL ? NULL : PyLong_AsVoidPtr(stream);
    if (PyErr_Occurred()) return NULL;
    int code;
    Py_BEGIN_ALLOW_THREADS /* it may wait for a launch that waits for a callback in Python */
    code = launcher->launch((void *)executable, on);
    Py_END_ALLOW_THREADS
    return code == 0 ? Py_NewRef(Py_None) : PyObject_CallFunction(launcher->fail, "i", code);
}

/* Returns what was filled, in its place of an empty list as long as `blank`. What looks for garbage does not see that. */
static PyObject *filled(const Recipe *recipe, PyObject *inputs, PyObject *memory, PyObject *blank) {
    PyObject *made = PyList_New(PyList_GET_SIZE(blank));
    if (made == NULL) return NULL;
    PyObject_GC_UnTrack(made);
    PyObject *done = fill(NULL, (PyObject *[]){recipe->plan, memory, inputs, made}, 4);
    if (done == NULL) Py_CLEAR(made);
    Py_XDECREF(done);
    return made;
}

enum { CALL_RECIPE, CALL_TABLE, INPUTS, MEMORY, BLANK, LAUNCH, STREAM, CALL_ARGUMENTS };

/* Returns (what the graph returns, what `launch` does, how many nodes were written), or NULL with an exception set. */
static PyObject *launch_and_make(const Recipe *recipe, const Table *table, uint64_t executable, PyObject *const *args) {
    const Picks *picks = PyCapsule_GetPointer(recipe->picks, PICKS);
    PyObject *launched = picks == NULL ? NULL : launched_by(args[LAUNCH], executable, args[STREAM]);
    PyObject *made = launched == NULL ? NULL : filled(recipe, args[INPUTS], args[MEMORY], args[BLANK]);
    PyObject *result = made == NULL ? NULL : picked(picks, (PyObject *[]){args[MEMORY], made, args[INPUTS]}, args[BLANK]);
    PyObject *all = result == NULL ? NULL : Py_BuildValue("OOn", result, launched, table->written);
    Py_XDECREF(result);
    Py_XDECREF(made);
    Py_XDECREF(launched);
    return all;
}

static PyObject *call(PyObject *module, PyObject *const *args, Py_ssize_t given) {
    if (given != CALL_ARGUMENTS || !are_lists(args + INPUTS, 3, 3)) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "7 arguments are wanted");
        return NULL;
    }
    const Recipe *recipe = PyCapsule_GetPointer(args[CALL_RECIPE], RECIPE);
    Table *table = recipe == NULL ? NULL : PyCapsule_GetPointer(args[CALL_TABLE], TABLE);
    if (table == NULL) return NULL;
    /* First, so that nothing is allocated for what cannot be looked at. */
    if (!read_inputs(table, args[INPUTS])) Py_RETURN_NONE;
    PyObject *result = NULL;
    if (allocate(recipe, args[MEMORY]) == 0) {
        const Executable *found = read_memory(table, args[MEMORY]) ? bound(table, args[STREAM]) : NULL;
        if (found != NULL) result = launch_and_make(recipe, table, found->handle, args);
        else if (!PyErr_Occurred()) result = Py_NewRef(Py_None);
    }
    let_go(recipe, args[MEMORY]);
    return result;
}
