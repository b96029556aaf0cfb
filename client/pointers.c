/* Looks at hundreds of tensors in one call: where they lie, and how many hold them.
 *
 * Built by `client/native.py` with nothing but a C compiler and Python's headers. Of torch it needs one function of libtorch's
 * stable C interface, and where in a Python object its tensor is, which `configure` is told. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

typedef int32_t (*get_data_ptr_t)(void *tensor, void **address);

static get_data_ptr_t get_data_ptr = NULL;
static PyTypeObject *tensor_type = NULL;
static Py_ssize_t handle_offset = 0;

static PyObject *configure(PyObject *module, PyObject *args) {
    PyObject *type;
    unsigned long long function;
    Py_ssize_t offset;
    if (!PyArg_ParseTuple(args, "O!nK", &PyType_Type, &type, &offset, &function)) return NULL;
    Py_INCREF(type);
    Py_XDECREF((PyObject *)tensor_type);
    tensor_type = (PyTypeObject *)type;
    handle_offset = offset;
    get_data_ptr = (get_data_ptr_t)(uintptr_t)function;
    Py_RETURN_NONE;
}

/* Puts the address of a tensor's first element into `address`; returns -1 with an exception set. */
static int address_of(PyObject *object, void **address) {
    if (get_data_ptr == NULL || !PyObject_TypeCheck(object, tensor_type)) {
        PyErr_SetString(PyExc_TypeError, "not a tensor, or `configure` was not called");
        return -1;
    }
    if (get_data_ptr((char *)object + handle_offset, address) != 0) {
        PyErr_SetString(PyExc_RuntimeError, "a tensor has no address");
        return -1;
    }
    return 0;
}

static int are_lists(PyObject *const *args, Py_ssize_t given, Py_ssize_t wanted) {
    int right = given == wanted;
    for (Py_ssize_t i = 0; right && i < wanted; i++) right = PyList_Check(args[i]);
    if (!right) PyErr_Format(PyExc_TypeError, "%zd lists are wanted", wanted);
    return right;
}

static PyObject *unchanged(PyObject *module, PyObject *const *args, Py_ssize_t given) {
    if (!are_lists(args, given, 3)) return NULL;
    PyObject *tensors = args[0], *pointers = args[1], *indices = args[2];
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(indices); i++) {
        Py_ssize_t index = PyLong_AsSsize_t(PyList_GET_ITEM(indices, i));
        if (index == -1 && PyErr_Occurred()) return NULL;
        if (index < 0 || index >= PyList_GET_SIZE(tensors) || index >= PyList_GET_SIZE(pointers)) {
            PyErr_SetString(PyExc_IndexError, "an index is beyond the end of a list");
            return NULL;
        }
        void *address;
        if (address_of(PyList_GET_ITEM(tensors, index), &address) < 0) return NULL;
        unsigned long long wanted = PyLong_AsUnsignedLongLong(PyList_GET_ITEM(pointers, index));
        if (wanted == (unsigned long long)-1 && PyErr_Occurred()) return NULL;
        if (wanted != (unsigned long long)(uintptr_t)address) Py_RETURN_FALSE;
    }
    Py_RETURN_TRUE;
}

static PyObject *references(PyObject *module, PyObject *const *args, Py_ssize_t given) {
    if (!are_lists(args, given, 1)) return NULL;
    Py_ssize_t size = PyList_GET_SIZE(args[0]);
    PyObject *counts = PyList_New(size);
    for (Py_ssize_t i = 0; counts != NULL && i < size; i++) {
        PyObject *count = PyLong_FromSsize_t(Py_REFCNT(PyList_GET_ITEM(args[0], i)));
        if (count == NULL) Py_CLEAR(counts);
        else PyList_SET_ITEM(counts, i, count);
    }
    return counts;
}

static PyObject *same_references(PyObject *module, PyObject *const *args, Py_ssize_t given) {
    if (!are_lists(args, given, 2)) return NULL;
    Py_ssize_t size = PyList_GET_SIZE(args[0]);
    if (size != PyList_GET_SIZE(args[1])) Py_RETURN_FALSE;
    for (Py_ssize_t i = 0; i < size; i++) {
        Py_ssize_t wanted = PyLong_AsSsize_t(PyList_GET_ITEM(args[1], i));
        if (wanted == -1 && PyErr_Occurred()) return NULL;
        if (Py_REFCNT(PyList_GET_ITEM(args[0], i)) != wanted) Py_RETURN_FALSE;
    }
    Py_RETURN_TRUE;
}

static PyMethodDef methods[] = {
    {"configure", configure, METH_VARARGS,
     "configure(type, offset, function): of tensors, where in an object the handle is, and aoti_torch_get_data_ptr."},
    {"unchanged", (PyCFunction)(void (*)(void))unchanged, METH_FASTCALL,
     "unchanged(tensors, pointers, indices): whether each tensor lies where its pointer says, at these indices."},
    {"references", (PyCFunction)(void (*)(void))references, METH_FASTCALL,
     "references(objects): how many references there are to each."},
    {"same_references", (PyCFunction)(void (*)(void))same_references, METH_FASTCALL,
     "same_references(objects, counts): whether there still are as many."},
    {NULL, NULL, 0, NULL}};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "pointers", "Looks at many tensors in one call.", -1, methods};

PyMODINIT_FUNC PyInit_pointers(void) { return PyModule_Create(&module); }
