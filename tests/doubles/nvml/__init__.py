"""A real ``libnvidia-ml.so.1`` made of our own C source, told by a JSON file what to say."""
