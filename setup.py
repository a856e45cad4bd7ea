"""Says which files the installed package has; pyproject.toml has everything else.

Commands read recipes and tables of a checkout, too. The package has copies of them in
sdbench/carried, where sdbench/base/carried.py finds them.
"""

from setuptools import find_namespace_packages, setup

CARRIED = {"configs": ["**/*.yaml"], "results": ["quoted/*.csv", "throughput.csv"]}
OF_SDBENCH = ["**/*.json", "**/*.yaml", "**/*.j2", "**/*.gz", "**/*.md"]

places = {f"sdbench.carried.{folder}": folder for folder in CARRIED}
setup(
    packages=[*find_namespace_packages(include=["sdbench*"]), *places],
    package_dir=places,
    package_data={"sdbench": OF_SDBENCH, **dict(zip(places, CARRIED.values(), strict=True))},
)
