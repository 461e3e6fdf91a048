"""For Lightning's trainers:
`callbacks=[nemo_patches.lightning.StopTogether()]` ends passes on all ranks together.
"""

from nemo_patches.options.stop_together import StopTogether as StopTogether
