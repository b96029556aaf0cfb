// Graphs over host memory: nodes and their parameters, with the structures of cuda.h, and kernels as functions. For host_driver.cpp.

#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <utility>
#include <vector>

namespace {

constexpr int kInvalidValue = 1;
constexpr int kInjected = 999;

struct Function {
    const char* name;
    void (*run)(void** arguments);
    std::vector<size_t> sizes;
};

struct KernelParams {
    void* func;
    unsigned grid[3], block[3], shared;
    void** kernelParams;
    void** extra;
    void* kern;
    void* ctx;
};

struct MemsetParams {
    uint64_t dst;
    size_t pitch;
    unsigned value, elementSize;
    size_t width, height;
};

struct Side {
    size_t x, y, z, lod;
    int memoryType;
    const void* host;
    uint64_t device;
    void* array;
    void* reserved;
    size_t pitch, height;
};

struct MemcpyParams {
    Side src, dst;
    size_t width, height, depth;
};

// Arguments as one buffer with the natural alignment of a C call, and pointers into it.
struct Arguments {
    std::vector<char> buffer;
    std::vector<void*> pointers;
    size_t size = 0;
    void* extra[5] = {};

    void layout(const Function& function) {
        std::vector<size_t> offsets;
        size = 0;
        for (size_t each : function.sizes) {
            const size_t alignment = each < 8 ? each : 8;
            size = (size + alignment - 1) / alignment * alignment;
            offsets.push_back(size);
            size += each;
        }
        buffer.assign(size, 0);
        for (size_t offset : offsets) pointers.push_back(buffer.data() + offset);
        void* list[5] = {reinterpret_cast<void*>(1), buffer.data(), reinterpret_cast<void*>(2), &size, nullptr};
        std::memcpy(extra, list, sizeof list);
    }

    void take(const Function& function, const KernelParams& params) {
        if (params.kernelParams) {
            for (size_t i = 0; i < function.sizes.size(); ++i) std::memcpy(pointers[i], params.kernelParams[i], function.sizes[i]);
        } else {
            std::memcpy(buffer.data(), params.extra[1], *static_cast<size_t*>(params.extra[3]));
        }
    }
};

struct Node {
    int type = 0;
    Function* function = nullptr;
    bool packed = false;
    int attribute = 0;  // the one that is set
    Arguments arguments;
    MemcpyParams copy{};
    MemsetParams set{};
    std::pair<bool, bool> mapping;  // of an executable's copy or memset: that of its operands when it was instantiated
};

void copy_node(const Node& from, Node& to) {
    to.type = from.type;
    to.function = from.function;
    to.packed = from.packed;
    to.attribute = from.attribute;
    to.copy = from.copy;
    to.set = from.set;
    if (from.function) {
        to.arguments.layout(*from.function);
        to.arguments.buffer.assign(from.arguments.buffer.begin(), from.arguments.buffer.end());
    }
}

struct Graph {
    std::vector<Node*> nodes;
};

struct Executable {
    std::vector<Node*> order;
    std::map<void*, Node*> by_handle;
    bool uploaded = false;
};

struct State {
    long calls = 0, fail_at = 0;
    long graphs = 0, executables = 0, early_writes = 0, single_kernels = 0;
    std::map<uint64_t, uint64_t> reserved;
    long mapped = 0, allocated = 0;
    int capture_mode = 0, stream_status = 0;
    std::vector<std::pair<uint64_t, uint64_t>> host, gone;
};

State state;

template <typename T>
T& argument(void** arguments, int index) {
    return *static_cast<T*>(arguments[index]);
}

void add(void** a) {
    for (int64_t i = 0; i < argument<int64_t>(a, 3); ++i)
        argument<float*>(a, 2)[i] = argument<float*>(a, 0)[i] + argument<float*>(a, 1)[i];
}

void scale(void** a) {
    for (int64_t i = 0; i < argument<int64_t>(a, 3); ++i)
        argument<float*>(a, 1)[i] = argument<float>(a, 2) * argument<float*>(a, 0)[i];
}

void accumulate(void** a) {
    for (int64_t i = 0; i < argument<int64_t>(a, 2); ++i) argument<float*>(a, 0)[i] += argument<float*>(a, 1)[i];
}

// Addresses within a structure that is passed by value, behind a number that is as large as one.
struct Parts {
    uint64_t magic;
    float* parts[3];
    int32_t count, length;
};

void gather(void** a) {
    const Parts& parts = argument<Parts>(a, 0);
    for (int32_t p = 0; p < parts.count; ++p)
        for (int32_t i = 0; i < parts.length; ++i) argument<float*>(a, 1)[p * parts.length + i] = parts.parts[p][i];
}

// A structure with a gap, in which anything may lie.
struct Gapped {
    float* source;
    int32_t length, gap;
};

void first(void** a) {
    const Gapped& gapped = argument<Gapped>(a, 0);
    if (gapped.length < 0 || gapped.length > 64) return;  // an address was written there
    for (int32_t i = 0; i < gapped.length; ++i) argument<float*>(a, 1)[i] = gapped.source[i];
}

// Writes from one address up to another one: as libraries do that think in iterators.
void until(void** a) {
    float *begin = argument<float*>(a, 1), *end = argument<float*>(a, 2);
    if (end < begin || end - begin > 4096) return;  // an address of something else
    for (int64_t i = 0; i < end - begin; ++i) begin[i] = 2 * argument<float*>(a, 0)[i];
}

// The input's address lies in memory, where relocation cannot see it.
void through_table(void** a) {
    for (int64_t i = 0; i < argument<int64_t>(a, 2); ++i) argument<float*>(a, 1)[i] = argument<float**>(a, 0)[0][i];
}

// So does the target's.
void into_table(void** a) {
    for (int64_t i = 0; i < argument<int64_t>(a, 1); ++i) argument<float**>(a, 0)[0][i] = static_cast<float>(argument<int64_t>(a, 1));
}

// As NCCL's kernels have it: a header, and work with addresses if `storage` is 0. Counts itself in `comm`; two ranks hold the same.
struct Reduce {
    int64_t* comm;
    uint64_t channels;
    uint32_t storage, mask;
    void* work;
    uint64_t batch[3];
    float *send, *receive;
    int64_t count;
};

void reduce(void** a) {
    const Reduce& reduce = argument<Reduce>(a, 0);
    ++*reduce.comm;
    for (int64_t i = 0; i < reduce.count; ++i) reduce.receive[i] = 2 * reduce.send[i];
}

Function functions[] = {
    {"add", add, {8, 8, 8, 8}},
    {"scale", scale, {8, 8, 4, 8}},
    {"accumulate", accumulate, {8, 8, 8}},
    {"gather", gather, {sizeof(Parts), 8}},
    {"first", first, {sizeof(Gapped), 8}},
    {"until", until, {8, 8, 8}},
    {"through_table", through_table, {8, 8, 8}},
    {"into_table", into_table, {8, 8}},
    {"ncclDevKernel_AllReduce", add, {8, 8, 8, 8}},
    {"_Z39ncclDevKernel_AllReduce_Sum_f32_RING_LL", reduce, {sizeof(Reduce)}},
    {"_Z30ncclSymkDevKernel_AllReduce", reduce, {sizeof(Reduce)}},
    {"triton_poi_fused_all_reduce_0", add, {8, 8, 8, 8}},
};

void run(Node& node) {
    if (node.type == 0) node.function->run(node.arguments.pointers.data());
    if (node.type == 1)
        std::memcpy(reinterpret_cast<void*>(node.copy.dst.device), reinterpret_cast<void*>(node.copy.src.device), node.copy.width);
    if (node.type == 2) std::memset(reinterpret_cast<void*>(node.set.dst), static_cast<int>(node.set.value), node.set.width);
}

int failure() {
    return ++state.calls == state.fail_at ? kInjected : 0;
}

int parameter(const Function& function, size_t index, size_t* offset, size_t* size) {
    if (index >= function.sizes.size()) return kInvalidValue;
    *offset = 0;
    *size = function.sizes[index];
    return 0;
}

template <typename Ranges>
bool within(const Ranges& ranges, uint64_t address) {
    for (const auto& [start, end] : ranges)
        if (start <= address && address < end) return true;
    return false;
}

// As CUDA does for copies and memsets, and for no kernel.
bool lies_in_memory_that_is_gone(const Node& node) {
    if (node.type == 1) return within(state.gone, node.copy.src.device) || within(state.gone, node.copy.dst.device);
    return node.type == 2 && within(state.gone, node.set.dst);
}

// Whether either operand lies where memory is mapped, and not allocated.
std::pair<bool, bool> mapping_of(const MemcpyParams& copy) {
    return {within(state.reserved, copy.src.device), within(state.reserved, copy.dst.device)};
}

std::pair<bool, bool> mapping_of(const MemsetParams& set) { return {false, within(state.reserved, set.dst)}; }

Node* at(void* executable, void* node) {
    auto& nodes = static_cast<Executable*>(executable)->by_handle;
    const auto found = nodes.find(node);
    state.early_writes += !static_cast<Executable*>(executable)->uploaded;
    return found == nodes.end() ? nullptr : found->second;
}

}  // namespace
