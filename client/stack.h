/* Pieces of Python's stack that are kept, so that no call maps memory and unmaps it.
 *
 * Part of `bulk.c`. In CPython before gh-142183, frames lie in pieces of 16 KB. A call that finds one full has the allocator of arenas map
 * another one, and unmap it when it returns: 6 us (20 and more where system calls are slow), at each call that is made just there. How
 * deep in its own calls a program calls us is chance, and a call of ours makes several. That allocator may be replaced, which is
 * documented; arenas are larger, and go where they went. */

#define PIECE (1 << 14)
#define KEPT_PIECES 4

static struct {
    PyObjectArenaAllocator others; /* what was there before */
    void *kept[KEPT_PIECES];       /* each is taken and put back at once: an interpreter may have a GIL of its own */
    int is_installed;
} stack;

static void *alloc_piece(void *context, size_t size) {
    for (int i = 0; size == PIECE && i < KEPT_PIECES; i++) {
        void *piece = __atomic_exchange_n(&stack.kept[i], NULL, __ATOMIC_ACQ_REL);
        if (piece != NULL) return piece;
    }
    return stack.others.alloc(stack.others.ctx, size);
}

static void free_piece(void *context, void *piece, size_t size) {
    for (int i = 0; size == PIECE && i < KEPT_PIECES; i++) {
        void *none = NULL;
        if (__atomic_compare_exchange_n(&stack.kept[i], &none, piece, 0, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED)) return;
    }
    stack.others.free(stack.others.ctx, piece, size);
}

static PyObject *keep_stack(PyObject *module, PyObject *unused) {
    if (!stack.is_installed) {
        PyObject_GetArenaAllocator(&stack.others);
        PyObject_SetArenaAllocator(&(PyObjectArenaAllocator){NULL, alloc_piece, free_piece});
        stack.is_installed = 1;
    }
    Py_RETURN_NONE;
}

/* Does not undo it if somebody else has come later: they would lose what they call. */
static PyObject *let_go_of_stack(PyObject *module, PyObject *unused) {
    PyObjectArenaAllocator now;
    PyObject_GetArenaAllocator(&now);
    if (stack.is_installed && now.alloc == alloc_piece) {
        PyObject_SetArenaAllocator(&stack.others);
        stack.is_installed = 0;
    }
    for (int i = 0; i < KEPT_PIECES; i++) {
        void *piece = __atomic_exchange_n(&stack.kept[i], NULL, __ATOMIC_ACQ_REL);
        if (piece != NULL) stack.others.free(stack.others.ctx, piece, PIECE);
    }
    Py_RETURN_NONE;
}

static PyObject *pieces_kept(PyObject *module, PyObject *unused) {
    long count = 0;
    for (int i = 0; i < KEPT_PIECES; i++) count += __atomic_load_n(&stack.kept[i], __ATOMIC_ACQUIRE) != NULL;
    return PyLong_FromLong(count);
}
