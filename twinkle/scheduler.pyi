from typing import Any

from torch.optim.lr_scheduler import ChainedScheduler as ChainedScheduler
from torch.optim.lr_scheduler import ConstantLR as ConstantLR
from torch.optim.lr_scheduler import CosineAnnealingLR as CosineAnnealingLR
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts as CosineAnnealingWarmRestarts
from torch.optim.lr_scheduler import CyclicLR as CyclicLR
from torch.optim.lr_scheduler import ExponentialLR as ExponentialLR
from torch.optim.lr_scheduler import LambdaLR as LambdaLR
from torch.optim.lr_scheduler import LinearLR as LinearLR
from torch.optim.lr_scheduler import MultiplicativeLR as MultiplicativeLR
from torch.optim.lr_scheduler import MultiStepLR as MultiStepLR
from torch.optim.lr_scheduler import OneCycleLR as OneCycleLR
from torch.optim.lr_scheduler import PolynomialLR as PolynomialLR
from torch.optim.lr_scheduler import ReduceLROnPlateau as ReduceLROnPlateau
from torch.optim.lr_scheduler import SequentialLR as SequentialLR
from torch.optim.lr_scheduler import StepLR as StepLR

from twinkle_core.train.schedulers import Constant as Constant
from twinkle_core.train.schedulers import CosineWarmup as CosineWarmup
from twinkle_core.train.schedulers import LinearWarmup as LinearWarmup

def __getattr__(name: str) -> Any: ...  # classes of other distributions
