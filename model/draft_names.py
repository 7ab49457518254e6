"""Names of a draft head's tensors; see `model.draft_head`."""

DRAFT_HEAD = "mtp.lm_head.weight"
D2T = "mtp.d2t"
T2D = "mtp.t2d"
