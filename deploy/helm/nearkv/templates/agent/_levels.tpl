{{/* Labels of distance for the agents' probes, of the extender's preset. Each level is one label, or
     several that mean the same with | between them. Levels that the extender makes of a part of a
     label are left out. tests/deploy/test_settings.py holds them equal to the extender's. */}}
{{- define "nearkv.probeLevels" -}}
{{- $zones := list "topology.kubernetes.io/zone|failure-domain.beta.kubernetes.io/zone" "topology.kubernetes.io/region|failure-domain.beta.kubernetes.io/region" -}}
{{- $levels := dict
    "generic" (list "nearkv.io/rack|topology.kubernetes.io/rack")
    "nvlink" (list "nvidia.com/gpu.clique")
    "topograph" (list "accelerator.topograph.run/sub-domain|network.topology.nvidia.com/accelerator" "fabric.topograph.run/tier-0|network.topology.nvidia.com/block" "fabric.topograph.run/tier-1|network.topology.nvidia.com/spine" "fabric.topograph.run/tier-2|network.topology.nvidia.com/datacenter")
    "aws" (list "topology.k8s.aws/ultraserver-id" "topology.k8s.aws/network-node-layer-3" "topology.k8s.aws/network-node-layer-2" "topology.k8s.aws/network-node-layer-1")
    "gcp" (list "cloud.google.com/gce-topology-subblock" "cloud.google.com/gce-topology-block")
    "oci" (list "oci.oraclecloud.com/host.rack_id|oci.oraclecloud.com/rdma.local_block_id" "oci.oraclecloud.com/host.network_block_id|oci.oraclecloud.com/rdma.network_block_id" "oci.oraclecloud.com/rdma.hpc_island_id")
    "coreweave" (list "ds.coreweave.com/nvlink.domain" "node.coreweave.cloud/rack" "backend.coreweave.cloud/leafgroup|ib.coreweave.cloud/leafgroup" "backend.coreweave.cloud/fabric|backend.coreweave.cloud/superpod") -}}
{{- dict "levels" (concat (get $levels .Values.extender.distancePreset) $zones) | toYaml -}}
{{- end -}}
