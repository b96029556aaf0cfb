/* A whole call of a graph that is bound to its addresses already: looks, allocates, launches, and makes what is returned.
 *
 * Part of `bulk.c`. What it does one after the other is what `client/replay.py` does step by step: there, each step is a few calls
 * of Python's, and of 100 us that a call of 300 tensors took, 20 were spent between the steps. */

/* What is the same at every call. */
typedef struct {
    PyObject *allocate;  /* called with each of */
    PyObject *arguments; /* a tuple of tuples; what comes of each goes */
    PyObject *slots;     /* to one of these indices of the memory. */
    PyObject *plan;      /* of `fill` */
    PyObject *picks;     /* of `gather` */
} Recipe;

#define RECIPE "pygraph.recipe"

static void free_recipe(PyObject *capsule) {
    Recipe *recipe = PyCapsule_GetPointer(capsule, RECIPE);
    Py_XDECREF(recipe->allocate);
    Py_XDECREF(recipe->arguments);
    Py_XDECREF(recipe->slots);
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

static PyObject *recipe(PyObject *module, PyObject *args) {
    PyObject *allocate, *arguments, *slots, *plan, *picks;
    if (!PyArg_ParseTuple(args, "OO!OOO", &allocate, &PyTuple_Type, &arguments, &slots, &plan, &picks)) return NULL;
    const Indices *indices = PyCapsule_GetPointer(slots, INDICES);
    if (indices == NULL || PyCapsule_GetPointer(plan, PLAN) == NULL || PyCapsule_GetPointer(picks, PICKS) == NULL) return NULL;
    if (!are_tuples(arguments)) return NULL;
    if (indices->count != PyTuple_GET_SIZE(arguments)) {
        PyErr_SetString(PyExc_ValueError, "there are not as many slots as allocations");
        return NULL;
    }
    Recipe *made = PyMem_Malloc(sizeof(Recipe));
    if (made == NULL) return PyErr_NoMemory();
    *made = (Recipe){Py_NewRef(allocate), Py_NewRef(arguments), Py_NewRef(slots), Py_NewRef(plan), Py_NewRef(picks)};
    PyObject *capsule = PyCapsule_New(made, RECIPE, free_recipe);
    if (capsule == NULL) PyMem_Free(made);
    return capsule;
}

/* Returns -1 with an exception set, and with some of it in `memory`. */
static int allocate(const Recipe *recipe, PyObject *memory) {
    const Indices *slots = PyCapsule_GetPointer(recipe->slots, INDICES);
    for (Py_ssize_t i = 0; i < slots->count; i++) {
        PyObject *made = PyObject_Call(recipe->allocate, PyTuple_GET_ITEM(recipe->arguments, i), NULL);
        if (made == NULL || PyList_SetItem(memory, slots->at[i], made) < 0) return -1;
    }
    return 0;
}

/* Leaves what was allocated to whoever was given it. */
static void let_go(const Recipe *recipe, PyObject *memory) {
    const Indices *slots = PyCapsule_GetPointer(recipe->slots, INDICES);
    for (Py_ssize_t i = 0; i < slots->count; i++) PyList_SetItem(memory, slots->at[i], Py_NewRef(Py_None));
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

/* Launches without Python; returns None, or NULL with an exception set. */
static PyObject *launch_by(const Launcher *launcher, PyObject *executable, PyObject *stream) {
    void *handle = PyLong_AsVoidPtr(executable), *on = PyErr_Occurred() ? NULL : PyLong_AsVoidPtr(stream);
    if (PyErr_Occurred()) return NULL;
    int code;
    Py_BEGIN_ALLOW_THREADS /* it may wait for a launch that waits for a callback in Python */
    code = launcher->launch(handle, on);
    Py_END_ALLOW_THREADS
    return code == 0 ? Py_NewRef(Py_None) : PyObject_CallFunction(launcher->fail, "i", code);
}

/* `launch` is what launches, an executable and a stream. */
static PyObject *launched_by(PyObject *const *launch) {
    if (!PyCapsule_CheckExact(launch[0])) return PyObject_Vectorcall(launch[0], launch + 1, 2, NULL);
    const Launcher *launcher = PyCapsule_GetPointer(launch[0], LAUNCHER);
    return launcher == NULL ? NULL : launch_by(launcher, launch[1], launch[2]);
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

/* Returns (what the graph returns, what `launch` does), or NULL with an exception set. */
static PyObject *launch_and_make(const Recipe *recipe, PyObject *inputs, PyObject *memory, PyObject *blank, PyObject *const *launch) {
    const Picks *picks = PyCapsule_GetPointer(recipe->picks, PICKS);
    PyObject *launched = picks == NULL ? NULL : launched_by(launch);
    PyObject *made = launched == NULL ? NULL : filled(recipe, inputs, memory, blank);
    PyObject *result = made == NULL ? NULL : picked(picks, (PyObject *[]){memory, made, inputs}, blank);
    PyObject *both = result == NULL ? NULL : PyTuple_Pack(2, result, launched);
    Py_XDECREF(result);
    Py_XDECREF(made);
    Py_XDECREF(launched);
    return both;
}

/* Whether all tensors lie where the addresses say; -1 with an exception set. */
static int all_lie_there(PyObject *indices, PyObject *tensors, PyObject *addresses) {
    PyObject *same = unchanged(NULL, (PyObject *[]){indices, tensors, addresses}, 3);
    int answer = same == NULL ? -1 : same == Py_True;
    Py_XDECREF(same);
    return answer;
}

enum { CALL_RECIPE, LOOKED_AT, INPUTS, ADDRESSES, MEMORY, MEMORY_ADDRESSES, BLANK, LAUNCH, EXECUTABLE, STREAM, CALL_ARGUMENTS };

static PyObject *call(PyObject *module, PyObject *const *args, Py_ssize_t given) {
    if (given != CALL_ARGUMENTS || !PyList_Check(args[INPUTS]) || !PyList_Check(args[MEMORY]) || !PyList_Check(args[BLANK])) {
        PyErr_SetString(PyExc_TypeError, "10 arguments are wanted; inputs, memory and what is made are lists");
        return NULL;
    }
    const Recipe *recipe = PyCapsule_GetPointer(args[CALL_RECIPE], RECIPE);
    if (recipe == NULL) return NULL;
    /* First, so that nothing is allocated for what does not fit. Inputs that cannot be looked at are told of step by step. */
    int fits = all_lie_there(args[LOOKED_AT], args[INPUTS], args[ADDRESSES]);
    if (fits < 0) PyErr_Clear();
    if (fits <= 0) Py_RETURN_NONE;
    PyObject *result = NULL;
    fits = allocate(recipe, args[MEMORY]) < 0 ? -1 : all_lie_there(recipe->slots, args[MEMORY], args[MEMORY_ADDRESSES]);
    if (fits > 0) result = launch_and_make(recipe, args[INPUTS], args[MEMORY], args[BLANK], args + LAUNCH);
    if (fits == 0) result = Py_NewRef(Py_None);
    let_go(recipe, args[MEMORY]);
    return result;
}

enum { TRACKED_RECIPE, ON_TRACK, PLACES, TRACKED_INPUTS, TRACKED_MEMORY, TRACKED_BLANK, TRACKED_LAUNCH, TRACKED_STREAM, TRACKED_ARGUMENTS };

/* Returns the place at an index, borrowed, or NULL with an exception set. */
static Place *place_at(PyObject *places, Py_ssize_t i, PyObject *track) {
    Place *place = PyCapsule_GetPointer(PyTuple_GET_ITEM(places, i), PLACE);
    if (place == NULL || place->track == track) return place;
    PyErr_SetString(PyExc_ValueError, "a place is of another track");
    return NULL;
}

/* Returns a place that is bound to these addresses: one that is already, or the first, and in `*written` how many of its nodes
 * were written; NULL with an exception set, or without one if they have come often. */
static Place *bound(PyObject *capsule, PyObject *places, const uint64_t *now, int *written) {
    Track *track = PyCapsule_GetPointer(capsule, TRACK);
    *written = 0;
    track->calls++;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(places); i++) {
        Place *place = place_at(places, i, capsule);
        if (place == NULL) return NULL;
        if (is_bound(track, place, now)) {
            place->used = track->calls;
            return place;
        }
    }
    Place *first = place_at(places, 0, capsule);
    if (comes_often(track, first, now)) return NULL;
    first->used = track->calls;
    *written = bind(track, first, now);
    return *written < 0 ? NULL : first;
}

/* Returns (outputs, what launching has returned, how many nodes were written), or NULL with an exception set; an empty tuple, with
 * nothing done, if the addresses have come often. */
static PyObject *launch_bound(const Recipe *recipe, PyObject *const *args, const uint64_t *now) {
    int written;
    Place *place = bound(args[ON_TRACK], args[PLACES], now, &written);
    if (place == NULL) return PyErr_Occurred() ? NULL : PyTuple_New(0);
    PyObject *launch[] = {args[TRACKED_LAUNCH], place->executable, args[TRACKED_STREAM]};
    PyObject *both = launch_and_make(recipe, args[TRACKED_INPUTS], args[TRACKED_MEMORY], args[TRACKED_BLANK], launch);
    if (both == NULL) return NULL;
    PyObject *done = Py_BuildValue("OOi", PyTuple_GET_ITEM(both, 0), PyTuple_GET_ITEM(both, 1), written);
    Py_DECREF(both);
    return done;
}

static PyObject *call_elsewhere(PyObject *module, PyObject *const *args, Py_ssize_t given) {
    if (given != TRACKED_ARGUMENTS || !PyTuple_Check(args[PLACES]) || PyTuple_GET_SIZE(args[PLACES]) == 0 ||
        !are_lists(args + TRACKED_INPUTS, 3, 3)) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "8 arguments are wanted; places are a tuple");
        return NULL;
    }
    const Recipe *recipe = PyCapsule_GetPointer(args[TRACKED_RECIPE], RECIPE);
    const Track *track = recipe == NULL ? NULL : PyCapsule_GetPointer(args[ON_TRACK], TRACK);
    if (track == NULL) return NULL;
    uint64_t now[MOST_TRACKED];
    /* First, as in `call`; what does not fit is told of step by step. */
    if (!read_places(args[TRACKED_INPUTS], track->followers, track->inputs, now)) Py_RETURN_NONE;
    const Follower *memories = track->followers + track->inputs;
    PyObject *result = NULL;
    if (allocate(recipe, args[TRACKED_MEMORY]) == 0) {
        int are_there = read_places(args[TRACKED_MEMORY], memories, track->count - track->inputs, now + track->inputs);
        result = are_there ? launch_bound(recipe, args, now) : Py_NewRef(Py_None);
    }
    let_go(recipe, args[TRACKED_MEMORY]);
    return result;
}
