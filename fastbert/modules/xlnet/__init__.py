"""XLNet (Yang et al. 2019): two-stream attention, relative positions, segments and memories."""

from fastbert.modules.xlnet.model import XLNetLMHeadModel, XLNetModel, XLNetOutput
from fastbert.xlnet_config import XLNetConfig

__all__ = ["XLNetConfig", "XLNetLMHeadModel", "XLNetModel", "XLNetOutput"]
