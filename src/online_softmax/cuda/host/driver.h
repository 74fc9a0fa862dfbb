// A program that reads launches and their arrays from a file, runs them, and writes the arrays back:
// what the sanitizers are built into, since Python cannot load a library that carries them.
//
// Input, 8-byte words: arrays; for each: bytes, address modulo PHASE, its bytes padded to 8;
// launches; for each: kernel, grid, block, cluster, shared bytes, cooperative, order, workers,
// arguments; for each: kind (p, i, f), array, offset in bytes or the value.
// Output: reads, writes, exps; then each array as above, without its phase.
#pragma once
#include "launch.h"

namespace host {

constexpr size_t PHASE = 256;  // so that alignment, and what kernels make of it, stays the same

struct Array {
  char* data;
  size_t bytes;
};

[[noreturn]] inline void refuse(const char* why) {
  fprintf(stderr, "%s\n", why);
  exit(2);
}

inline int64_t read_word(FILE* file) {
  int64_t word = 0;
  if (fread(&word, 8, 1, file) != 1) refuse("the launch file is too short");
  return word;
}

// Exactly as large as the tensor: one element past either end is an error that ASan sees (before
// the start, to within 8 bytes).
inline Array read_array(FILE* file) {
  Array array = {nullptr, size_t(read_word(file))};
  const size_t phase = size_t(read_word(file));
  void* memory = nullptr;
  if (posix_memalign(&memory, PHASE, phase + array.bytes) != 0) refuse("no memory");
  array.data = static_cast<char*>(memory) + phase;
#if defined(HOST_ASAN)
  ASAN_POISON_MEMORY_REGION(memory, phase);
#endif
  if (array.bytes && fread(array.data, array.bytes, 1, file) != 1)
    refuse("the launch file is too short");
  if (array.bytes % 8) fseek(file, long(8 - array.bytes % 8), SEEK_CUR);
  return array;
}

inline void run_next(FILE* file, const Array* arrays, const Kernel* kernels,
                     uint64_t (&counts)[3]) {
  const int64_t kernel = read_word(file);
  Request request = {};
  int64_t* const fields[] = {&request.grid,         &request.block,       &request.cluster,
                             &request.shared_bytes, &request.cooperative, &request.order,
                             &request.workers};
  for (int64_t* field : fields) *field = read_word(file);
  constexpr int MAX_ARGUMENTS = 128;
  uint64_t slots[MAX_ARGUMENTS];
  const int64_t count = read_word(file);
  const char* kinds = kernels[kernel].kinds;
  if (count > MAX_ARGUMENTS || size_t(count) != strlen(kinds))
    refuse("the kernel has another number of parameters");
  for (int64_t i = 0; i < count; ++i) {
    const int64_t kind = read_word(file), array = read_word(file), value = read_word(file);
    if (kind != kinds[i]) refuse("an argument is of another kind than the kernel's parameter");
    slots[i] =
        kind == 'p' ? reinterpret_cast<uint64_t>(arrays[array].data + value) : uint64_t(value);
  }
  request.slots = slots;
  request.stacks = &stack_pool;
  run(&request, kernels[kernel].call);
  if (request.error[0]) {
    fprintf(stderr, "fault: %s\n", request.error);
    exit(3);
  }
  counts[0] += request.reads, counts[1] += request.writes, counts[2] += request.exps;
}

inline int drive(const char* input, const char* output, const Kernel* kernels) {
  FILE* file = fopen(input, "rb");
  if (file == nullptr) return 2;
  const int64_t array_count = read_word(file);
  Array* arrays = static_cast<Array*>(calloc(size_t(array_count) + 1, sizeof(Array)));
  for (int64_t i = 0; i < array_count; ++i) arrays[i] = read_array(file);
  uint64_t counts[3] = {};
  for (int64_t launches = read_word(file); launches > 0; --launches)
    run_next(file, arrays, kernels, counts);
  fclose(file);

  file = fopen(output, "wb");
  if (file == nullptr || fwrite(counts, sizeof(counts), 1, file) != 1) return 2;
  for (int64_t i = 0; i < array_count; ++i) {
    const uint64_t padding = 0;
    if (arrays[i].bytes && fwrite(arrays[i].data, arrays[i].bytes, 1, file) != 1) return 2;
    if (arrays[i].bytes % 8) fwrite(&padding, 8 - arrays[i].bytes % 8, 1, file);
  }
  return fclose(file) == 0 ? 0 : 2;
}

}  // namespace host

int main(int count, char** values) {
  return count == 3 ? host::drive(values[1], values[2], host_kernels) : 2;
}
