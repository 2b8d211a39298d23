"""Video data: from folders of videos to batches of (clip, 6 frames, 57,600).

find_dataset -> prepare (decode once) -> make_folds -> Loader; write_synthetic makes a data set where there is none.
"""

from kronecell.data.archives import extract
from kronecell.data.cache import Store, open_store, prepare
from kronecell.data.clips import PIXEL_SCALE, training_frames, validation_frames
from kronecell.data.datasets import Clip, Dataset, find_dataset
from kronecell.data.folds import make_folds
from kronecell.data.loader import Batch, Loader
from kronecell.data.manifest import BadFile
from kronecell.data.synthetic import MOTIONS, write_synthetic
from kronecell.data.verify import Verification, verify
from kronecell.data.video import Limits, Video, decode

__all__ = [
    "MOTIONS",
    "PIXEL_SCALE",
    "BadFile",
    "Batch",
    "Clip",
    "Dataset",
    "Limits",
    "Loader",
    "Store",
    "Verification",
    "Video",
    "decode",
    "extract",
    "find_dataset",
    "make_folds",
    "open_store",
    "prepare",
    "training_frames",
    "validation_frames",
    "verify",
    "write_synthetic",
]
