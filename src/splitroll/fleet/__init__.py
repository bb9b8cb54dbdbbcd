"""The engines of one rollout system: launched, proven, watched, restarted."""
