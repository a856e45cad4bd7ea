"""What a run does: the tasks, and the training jobs that they build."""

# Subclasses of `sdbench.run.task.Task` by kind, imported when one is chosen.
TASKS = {
    "benchmark": "sdbench.tasks.benchmark:Benchmark",
    "feed": "sdbench.tasks.feed:Feed",
    "generate": "sdbench.tasks.generate:Generate",
    "precompute": "sdbench.tasks.encode.precompute:Precompute",
    "profile": "sdbench.tasks.profile_step:ProfileStep",
    "train": "sdbench.tasks.train.task:Train",
}
