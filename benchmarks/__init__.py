"""Measurements that only documents quote. They are not in the wheel; `lintra bench` has what users need."""
