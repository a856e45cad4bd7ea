"""Runs a task: the runner, the outcome of a run, its progress and logs; `TASKS` are all of them."""

# Subclasses of `Task` in task.py, by kind, imported when one is chosen.
TASKS = {
    "benchmark": "sdbench.measuring.benchmark:Benchmark",
    "feed": "sdbench.measuring.feed:Feed",
    "generate": "sdbench.drawing.generate:Generate",
    "precompute": "sdbench.encoding.precompute:Precompute",
    "profile": "sdbench.measuring.profile_step:ProfileStep",
    "train": "sdbench.training.train:Train",
}
