"""The part that decides. It imports no torch: a scheduler test or lesson runs in milliseconds."""
