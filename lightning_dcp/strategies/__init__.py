"""Lightning's side: the strategies, and what of Lightning they touch."""
