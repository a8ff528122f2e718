#include "workers.h"

#include <sys/syscall.h>
#include <unistd.h>

namespace fastbert::cpu {

const std::shared_ptr<Worker>& Worker::self() {
  struct Life {
    std::shared_ptr<Worker> worker = std::make_shared<Worker>((pid_t)syscall(SYS_gettid));
    ~Life() { worker->ended(); }
  };
  thread_local const Life life;
  return life.worker;
}

void Worker::ended() {
  const std::lock_guard<std::mutex> lock(mutex_);
  alive_ = false;
}

void Worker::avoid(int core) {
  const std::lock_guard<std::mutex> lock(mutex_);
  cpu_set_t now;
  if (!alive_ || sched_getaffinity(thread_, sizeof now, &now) != 0) return;
  if (avoided_ < 0 || !CPU_EQUAL(&now, &given_)) allowed_ = now;
  avoided_ = core;
  given_ = allowed_;
  CPU_CLR(core, &given_);
  if (CPU_COUNT(&given_) == 0) given_ = allowed_;
  if (!CPU_EQUAL(&now, &given_)) sched_setaffinity(thread_, sizeof given_, &given_);
}

Workers& Workers::mine() {
  thread_local Workers workers;
  return workers;
}

void Workers::prepare(int threads) {
  const int core = sched_getcpu();
  for (const std::shared_ptr<Worker>& worker : known_) {
    if (worker && core >= 0 && worker->avoided() != core) worker->avoid(core);
  }
  known_.resize(threads);
}

void Workers::join(int number) {
  if (known_[number] != Worker::self()) known_[number] = Worker::self();
}

}  // namespace fastbert::cpu
