// The driver's graph calls over host memory: kernels are functions of this process, device memory is malloc's.
//
// It lets the bookkeeping of relocation be tested where there is no GPU, with real addresses and real results. It says nothing
// about CUDA: that is for tests/gpu. Structures are those of cuda.h, written down once more so that a mistake in
// client/backend/driver.py shows.

#include "host_graph.h"

#include <sys/mman.h>
#include <unistd.h>

#define CALL(name, ...) extern "C" int name(__VA_ARGS__)
#define FAIL_IF_ASKED \
    if (int code = failure()) return code

CALL(cuGraphClone, void** clone, void* graph) {
    FAIL_IF_ASKED;
    auto* copy = new Graph;
    for (const Node* node : static_cast<Graph*>(graph)->nodes) {
        copy->nodes.push_back(new Node);
        copy_node(*node, *copy->nodes.back());
    }
    ++state.graphs;
    *clone = copy;
    return 0;
}

CALL(cuGraphDestroy, void* graph) {
    --state.graphs;
    for (Node* node : static_cast<Graph*>(graph)->nodes) delete node;
    delete static_cast<Graph*>(graph);
    return failure();
}

CALL(cuGraphDestroyNode, void*) { return kInvalidValue; }

CALL(cuGraphGetNodes, void* graph, void** nodes, size_t* count) {
    FAIL_IF_ASKED;
    const auto& all = static_cast<Graph*>(graph)->nodes;
    if (nodes && all.empty()) return kInvalidValue;
    if (nodes) std::memcpy(nodes, all.data(), all.size() * sizeof(void*));
    *count = all.size();
    return 0;
}

CALL(cuGraphInstantiateWithFlags, void** executable, void* graph, uint64_t) {
    FAIL_IF_ASKED;
    for (const Node* node : static_cast<Graph*>(graph)->nodes)
        if (lies_in_memory_that_is_gone(*node)) return kInvalidValue;
    auto* made = new Executable;
    for (Node* node : static_cast<Graph*>(graph)->nodes) {
        Node* copy = made->by_handle[node] = new Node;
        copy_node(*node, *copy);
        copy->mapping = node->type == 1 ? mapping_of(node->copy) : mapping_of(node->set);
        made->order.push_back(copy);
    }
    ++state.executables;
    *executable = made;
    return 0;
}

CALL(cuGraphExecDestroy, void* executable) {
    --state.executables;
    for (Node* node : static_cast<Executable*>(executable)->order) delete node;
    delete static_cast<Executable*>(executable);
    return failure();
}

CALL(cuGraphUpload, void* executable, void*) {
    FAIL_IF_ASKED;
    static_cast<Executable*>(executable)->uploaded = true;
    return 0;
}

CALL(cuGraphLaunch, void* executable, void*) {
    FAIL_IF_ASKED;
    static_cast<Executable*>(executable)->uploaded = true;
    for (Node* node : static_cast<Executable*>(executable)->order) run(*node);
    return 0;
}

CALL(cuGraphNodeGetType, void* node, int* type) {
    FAIL_IF_ASKED;
    *type = static_cast<Node*>(node)->type;
    return 0;
}

CALL(cuGraphKernelNodeGetParams_v2, void* handle, KernelParams* params) {
    FAIL_IF_ASKED;
    auto* node = static_cast<Node*>(handle);
    *params = {};
    params->func = node->function;
    if (node->packed) params->extra = node->arguments.extra;
    else params->kernelParams = node->arguments.pointers.data();
    return 0;
}

CALL(cuLaunchKernel, void* function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void** pointers, void** extra) {
    FAIL_IF_ASKED;
    if ((pointers != nullptr) == (extra != nullptr)) return kInvalidValue;
    Node node;
    node.function = static_cast<Function*>(function);
    node.arguments.layout(*node.function);
    KernelParams params{};
    params.kernelParams = pointers;
    params.extra = extra;
    node.arguments.take(*node.function, params);
    run(node);
    ++state.single_kernels;
    return 0;
}

// Not counted: if the driver does not tell, the kernel has an executable, so a failure here is no fault.
CALL(cuGraphKernelNodeGetAttribute, void* handle, int attribute, uint64_t* value) {
    std::memset(value, 0, 8 * sizeof(uint64_t));
    value[0] = attribute == static_cast<Node*>(handle)->attribute;
    return 0;
}

CALL(cuGraphMemcpyNodeGetParams, void* node, MemcpyParams* params) {
    FAIL_IF_ASKED;
    *params = static_cast<Node*>(node)->copy;
    return 0;
}

CALL(cuGraphMemsetNodeGetParams, void* node, MemsetParams* params) {
    FAIL_IF_ASKED;
    *params = static_cast<Node*>(node)->set;
    return 0;
}

CALL(cuGraphKernelNodeSetParams_v2, void* handle, const KernelParams* params) {
    FAIL_IF_ASKED;
    auto* node = static_cast<Node*>(handle);
    if (node->type != 0 || params->func != node->function) return kInvalidValue;
    node->arguments.take(*node->function, *params);
    return 0;
}

CALL(cuGraphMemcpyNodeSetParams, void* node, const MemcpyParams* params) {
    FAIL_IF_ASKED;
    if (static_cast<Node*>(node)->type != 1) return kInvalidValue;
    static_cast<Node*>(node)->copy = *params;
    return 0;
}

CALL(cuGraphMemsetNodeSetParams, void* node, const MemsetParams* params) {
    FAIL_IF_ASKED;
    if (static_cast<Node*>(node)->type != 2) return kInvalidValue;
    static_cast<Node*>(node)->set = *params;
    return 0;
}

CALL(cuGraphExecKernelNodeSetParams_v2, void* executable, void* handle, const KernelParams* params) {
    FAIL_IF_ASKED;
    Node* node = at(executable, handle);
    if (!node || node->type != 0 || params->func != node->function) return kInvalidValue;
    node->arguments.take(*node->function, *params);
    return 0;
}

// A copy or memset stays between memory that is mapped as at the instantiation; a node of the graph itself may get any.
CALL(cuGraphExecMemcpyNodeSetParams, void* executable, void* handle, const MemcpyParams* params, void* context) {
    FAIL_IF_ASKED;
    Node* node = at(executable, handle);
    if (!node || node->type != 1 || !context || mapping_of(*params) != node->mapping) return kInvalidValue;
    node->copy = *params;
    return 0;
}

CALL(cuGraphExecMemsetNodeSetParams, void* executable, void* handle, const MemsetParams* params, void* context) {
    FAIL_IF_ASKED;
    Node* node = at(executable, handle);
    if (!node || node->type != 2 || !context || mapping_of(*params) != node->mapping) return kInvalidValue;
    node->set = *params;
    return 0;
}

CALL(cuFuncGetName, const char** name, void* function) {
    FAIL_IF_ASKED;
    *name = static_cast<Function*>(function)->name;
    return 0;
}

CALL(cuKernelGetName, const char** name, void* function) { return cuFuncGetName(name, function); }

// Not counted: the end of the list is told by an error, so a failure here is no fault.
CALL(cuFuncGetParamInfo, void* function, size_t index, size_t* offset, size_t* size) {
    return parameter(*static_cast<Function*>(function), index, offset, size);
}

CALL(cuKernelGetParamInfo, void* function, size_t index, size_t* offset, size_t* size) {
    return parameter(*static_cast<Function*>(function), index, offset, size);
}

CALL(cuStreamBatchMemOp_v2, void*, unsigned count, const uint64_t* operations, unsigned) {
    FAIL_IF_ASKED;
    for (unsigned i = 0; i < count; i++) {
        const uint64_t* words = operations + 6 * i;
        if (words[0] != 5) return 1;  // 64 bits are written, and nothing else is known here
        std::memcpy(reinterpret_cast<void*>(words[1]), &words[2], sizeof(uint64_t));
    }
    return 0;
}

CALL(cuMemcpyDtoH_v2, void* to, uint64_t address, size_t size) {
    FAIL_IF_ASKED;
    std::memcpy(to, reinterpret_cast<void*>(address), size);
    return 0;
}

CALL(cuPointerGetAttribute, void* value, int, uint64_t address) {
    *static_cast<unsigned*>(value) = within(state.host, address) ? 1 : 2;
    return 0;
}

CALL(cuCtxGetCurrent, void** context) {
    FAIL_IF_ASKED;
    *context = &state;
    return 0;
}

// Not counted: every call of a recording begins with it. A negative status is an error of an earlier call.
CALL(cuStreamIsCapturing, void*, int* status) {
    *status = state.stream_status;
    return state.stream_status < 0 ? kInjected : 0;
}

CALL(cuStreamCreate, void** stream, unsigned flags) {
    FAIL_IF_ASKED;
    if (flags != 1) return kInvalidValue;  // others wait for the default stream
    *stream = new char;
    return 0;
}

// Not counted: it is asked for before what is destroyed, and must not keep that from being destroyed.
CALL(cuThreadExchangeStreamCaptureMode, int* mode) {
    std::swap(*mode, state.capture_mode);
    return 0;
}

// Addresses without memory are pages that may not be accessed; an allocation is a file without a name, which can be mapped many times.
constexpr size_t kPage = 2 << 20;

CALL(cuMemAddressReserve, uint64_t* address, size_t size, size_t, uint64_t, uint64_t) {
    FAIL_IF_ASKED;
    if (!size || size % kPage) return kInvalidValue;
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    char* whole = static_cast<char*>(mmap(nullptr, size + kPage, PROT_NONE, flags, -1, 0));
    if (whole == MAP_FAILED) return 2;
    char* start = whole + (kPage - reinterpret_cast<uint64_t>(whole) % kPage);  // never 0, so that there is a rest at either end
    munmap(whole, start - whole);
    if (start < whole + kPage) munmap(start + size, whole + kPage - start);
    *address = reinterpret_cast<uint64_t>(start);
    state.reserved[*address] = *address + size;
    return 0;
}

CALL(cuMemAddressFree, uint64_t address, size_t size) {
    const auto found = state.reserved.find(address);
    if (found == state.reserved.end() || found->second != address + size) return kInvalidValue;
    state.reserved.erase(found);
    munmap(reinterpret_cast<void*>(address), size);
    return failure();
}

CALL(cuMemCreate, uint64_t* handle, size_t size, const int* properties, uint64_t) {
    FAIL_IF_ASKED;
    if (size % kPage || properties[0] != 1 || properties[2] != 1) return kInvalidValue;
    const int file = memfd_create("memory", 0);
    if (file < 0 || ftruncate(file, size)) return 2;
    *handle = file;
    ++state.allocated;
    return 0;
}

CALL(cuMemRelease, uint64_t handle) {
    --state.allocated;
    close(handle);
    return failure();
}

CALL(cuMemMap, uint64_t address, size_t size, size_t offset, uint64_t handle, uint64_t) {
    FAIL_IF_ASKED;
    if (address % kPage || size % kPage || offset) return kInvalidValue;
    void* made = mmap(reinterpret_cast<void*>(address), size, PROT_NONE, MAP_SHARED | MAP_FIXED, handle, 0);
    if (made == MAP_FAILED) return 2;
    state.mapped += size;
    return 0;
}

CALL(cuMemUnmap, uint64_t address, size_t size) {
    state.mapped -= size;
    mmap(reinterpret_cast<void*>(address), size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    return failure();
}

CALL(cuMemSetAccess, uint64_t address, size_t size, const int* access, size_t count) {
    FAIL_IF_ASKED;
    if (count != 1 || access[0] != 1 || access[2] != 3) return kInvalidValue;
    return mprotect(reinterpret_cast<void*>(address), size, PROT_READ | PROT_WRITE) ? kInvalidValue : 0;
}

// --- for the tests -------------------------------------------------------------------------------------------------

extern "C" void* emulator_graph() {
    ++state.graphs;
    return new Graph;
}

extern "C" int emulator_add_kernel(void* graph, const char* name, void** arguments, int packed) {
    for (Function& function : functions) {
        if (std::strcmp(function.name, name) != 0) continue;
        auto* node = new Node;
        node->function = &function;
        node->packed = packed;
        node->arguments.layout(function);
        KernelParams params{};
        params.kernelParams = arguments;
        node->arguments.take(function, params);
        static_cast<Graph*>(graph)->nodes.push_back(node);
        return 0;
    }
    return kInvalidValue;
}

extern "C" void emulator_set_attribute(void* graph, int attribute) { static_cast<Graph*>(graph)->nodes.back()->attribute = attribute; }

extern "C" void emulator_add_copy(void* graph, uint64_t to, uint64_t from, size_t size, int memory_type, size_t height, size_t depth) {
    auto* node = new Node;
    node->type = 1;
    node->copy.src.memoryType = node->copy.dst.memoryType = memory_type;
    node->copy.src.device = from;
    node->copy.dst.device = to;
    node->copy.width = size;
    node->copy.height = height;
    node->copy.depth = depth;
    static_cast<Graph*>(graph)->nodes.push_back(node);
}

extern "C" void emulator_add_set(void* graph, uint64_t to, unsigned value, size_t size) {
    auto* node = new Node;
    node->type = 2;
    node->set = {to, size, value, 1, size, 1};
    static_cast<Graph*>(graph)->nodes.push_back(node);
}

extern "C" void emulator_add_other(void* graph, int type) {
    auto* node = new Node;
    node->type = type;
    static_cast<Graph*>(graph)->nodes.push_back(node);
}

extern "C" void emulator_host_memory(uint64_t start, size_t size) { state.host.emplace_back(start, start + size); }

extern "C" void emulator_memory_is_gone(uint64_t start, size_t size) { state.gone.emplace_back(start, start + size); }

extern "C" void emulator_forget_memory() {
    state.host.clear();
    state.gone.clear();
}

extern "C" void emulator_fail_at(long call) {
    state.fail_at = call;
    state.calls = 0;
}

extern "C" void emulator_capturing(int status) { state.stream_status = status; }
extern "C" long emulator_calls() { return state.calls; }
extern "C" long emulator_early_writes() { return state.early_writes; }
extern "C" long emulator_single_kernels() { return state.single_kernels; }
extern "C" long emulator_live_graphs() { return state.graphs; }
extern "C" long emulator_live_executables() { return state.executables; }
extern "C" long emulator_live_memory() { return static_cast<long>(state.reserved.size()) + state.mapped + state.allocated; }
