import a_package_that_is_not_here  # noqa: F401

from ..factory import register_dataset

DATASET_NAME = "needs"
register_dataset(DATASET_NAME, None, None)
