"""The chart and what is made from it: rendered, validated, compared; ``render`` writes it anew."""
