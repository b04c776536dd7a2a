// A caching allocator after the manner of CUDA's: blocks of 512 bytes in segments of 2 and 20 MiB, best fit, split and
// merged; statistics, a history, and faults on demand.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>

#include <atomic>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "streams.h"

namespace test_accelerator {

struct Segment;

struct Block {
  Segment* segment;
  char* address;
  size_t size;
  size_t requested = 0;
  bool is_allocated = false;
  Block* before = nullptr;  // in its segment
  Block* after = nullptr;
  std::vector<c10::Stream> used_on;  // streams beside its own that are to be done with it
};

struct Segment {
  char* address;
  size_t size;
  bool is_small;
  c10::StreamId stream;
  Block* first;
};

struct Event {
  const char* action;  // as CUDA's history names it
  size_t address;
  size_t size;
  int64_t time_ns;
  c10::StreamId stream;
};

struct Faults {
  std::atomic<int64_t> fail_in{0};           // the allocation of that number from now on finds no memory
  std::atomic<bool> never_merge{false};      // blocks that were split stay so
  std::atomic<bool> poisons{true};           // what is freed is overwritten, as another owner would
};
Faults& faults();

// What there is of one device.
// Where segments are: each above all before it, as drivers mostly do, so that it is known which of equal blocks is first.
class Addresses {
 public:
  // None where the host has no memory left.
  char* take(size_t size);
  void give_back(char* address, size_t size);

 private:
  char* next_ = nullptr;
  char* end_ = nullptr;
};

class Pool {
 public:
  explicit Pool(c10::DeviceIndex device);

  void* allocate(size_t requested, c10::StreamId stream);
  void release(void* address);
  void used_on(void* address, c10::Stream stream);
  void empty_cache();
  void limit(size_t total_bytes);
  size_t total_bytes() const;
  size_t free_bytes();
  c10::CachingDeviceAllocator::DeviceStats stats();
  void reset_peaks();
  void reset_accumulated();
  void record_history(bool is_on);
  bool records_history();
  std::vector<Event> history();
  std::vector<Segment> segments();
  // Blocks of a segment in order: address, size, requested size, whether it is in use.
  std::vector<std::tuple<size_t, size_t, size_t, bool>> blocks(const Segment& segment);

 private:
  struct Less {
    bool operator()(const Block* one, const Block* other) const;
  };
  using Free = std::set<Block*, Less>;

  Block* found(size_t size, bool is_small, c10::StreamId stream);
  Block* in_new_segment(size_t size, bool is_small, c10::StreamId stream);
  void split(Block* block, size_t size);
  void put_back(Block* block);
  Block* merged(Block* block, Block* other);
  void put_back_what_streams_are_done_with(bool wait);
  void give_back_segments();
  void note(const char* action, const void* address, size_t size, c10::StreamId stream);
  template <typename Change>
  void count(c10::CachingAllocator::StatArray& stat, bool is_small, Change change);

  const c10::DeviceIndex device_;
  std::recursive_mutex mutex_;
  std::map<std::pair<bool, c10::StreamId>, Free> free_;
  std::unordered_map<void*, Block*> live_;
  std::list<std::pair<Block*, std::vector<MomentPointer>>> leaving_;  // freed, and still in use on other streams
  Addresses addresses_;
  std::map<char*, std::unique_ptr<Segment>> segments_;
  c10::CachingDeviceAllocator::DeviceStats stats_;
  size_t reserved_ = 0;
  size_t total_ = size_t(16) << 30;
  bool records_ = false;
  std::vector<Event> history_;
};

Pool& pool_of(c10::DeviceIndex device);
c10::DeviceAllocator* allocator();
c10::Allocator* pinned_allocator();
bool is_pinned(const void* address);
// A copy on that stream reads or writes this pinned memory: it is not given to others before that is done.
void pinned_used_on(const void* address, const c10::Stream& stream);

}  // namespace test_accelerator
